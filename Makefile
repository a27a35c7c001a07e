# The commands of a person who has just cloned this. CMake and Ninja do the building; this file only puts set-up, build
# and use in a row. Needs nothing but make and a Debian: tools/setup.sh installs what is missing.
#
#   make                 builds build/qeffect
#   make train           trains the model of examples/quickstart.yaml
#   make check           builds and passes all tests, the style check and those of the Python package among them
#   make check-torch     the Python tests that need torch, on a CPU; installs torch below build/: some GB, some minutes
#   make check-adversary right programs of every kind, and single faults in them: all are trapped by the right rule
#   make check-analysis  cppcheck, clang-tidy and gcc -fanalyzer on the core, which they must find nothing in
#   make check-crash     kills and failures at every system call on checkpoints: thousands of cases, some minutes
#   make check-faults    every allocation, thread, file, device and transport call fails in turn: an hour
#   make check-fuzz      whatever bytes for every reader, with sanitizers, FUZZ_SECONDS (60) each; needs clang
#   make check-gpu       builds with CUDA (build-cuda/) and, where there is a GPU, checks what runs on it: some minutes;
#                        TE=FOLDER: Transformer Engine's kernels too
#   make check-model     models of the step's protocol and of split backwards, exhaustively, with broken ones (Spin)
#   make check-mutants   small faults in the sources of the contract core: the share that its tests notice, some minutes
#   make check-oracle    traces against a naive second judge: all short ones, a million longer ones, some minutes
#   make check-scale     seconds and memory of traces of 2.5, 5 and 10 million lines
#   make check-sanitize  all tests again under AddressSanitizer + UndefinedBehaviorSanitizer, then ThreadSanitizer
#   make coverage        all tests again, then the share of lines and branches of core, plan and step they reach
#   make clean           removes what was built

.PHONY: build setup train check check-adversary check-adversary-threads check-crash check-faults check-gpu \
    check-mutants check-oracle check-scale check-sanitize check-asan check-tsan check-torch coverage clean
.DEFAULT_GOAL := build
.DELETE_ON_ERROR: # half-made build files would be taken for good ones

TEST_JOBS ?= 2
# Sanitized programs are several times slower; a test that takes longer than this hangs.
SANITIZED_TEST_SECONDS := 600
# Some kernels place libraries where ThreadSanitizer's shadow memory must be; without address randomisation they do not.
FIXED_ADDRESSES := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)
# CMake's pages of findings are shown only where it fails.
configure = mkdir -p $(1) && { cmake -G Ninja -S . -B $(1) $(2) >$(1)/configure.log 2>&1 \
    || { cat $(1)/configure.log; exit 1; }; }
MEMORY_SANITIZERS := address,undefined

build: setup build/build.ninja
	@echo "build: build/qeffect"
	@ninja -C build qeffect_cli

setup:
	@sh tools/setup.sh

build/build.ninja: CMakeLists.txt | setup
	@echo "configure: build/"
	@$(call configure,build,)

train: build
	@echo "train: build/qeffect train examples/quickstart.yaml"
	@build/qeffect train examples/quickstart.yaml

check: build
	@echo "build: tests"
	@ninja -C build
	@echo "check: all tests"
	@ctest --test-dir build --output-on-failure -j$(TEST_JOBS)
	@echo "check: the Python package"
	@sh tools/check_python.sh

check-torch: setup
	@echo "check-torch: the Python package with torch on a CPU"
	@sh tools/check_python.sh torch

# Two parts at a time, but ThreadSanitizer has the machine to itself; each leaves its counts, which make one table.
ADVERSARY_MUTANTS ?= 12500
ADVERSARY_PROGRAMS ?= 10000
ADVERSARY_SEED ?= 0
STEPS_TEAMS ?= 500
RESUME_TEAMS ?= 60
TEAM_FAULTS ?= 8
THREADS_PROGRAMS ?= 300
THREADS_MUTANTS ?= 6
adversary = ADVERSARY_COUNTS=adversary.$(1).counts tests/$(2) >adversary.$(1).log 2>&1
check-adversary: build
	@ninja -C build adversary adversary_steps adversary_resume
	@rm -f build/adversary.*
	@echo "check-adversary: 2 x $(ADVERSARY_MUTANTS) faults in $(ADVERSARY_PROGRAMS) programs; $(TEAM_FAULTS) faults in" \
	    "the steps of each of $(STEPS_TEAMS) teams, in the checkpoints of each of $(RESUME_TEAMS)"
	@cd build; failed=0; \
	{ $(call adversary,1,adversary $(ADVERSARY_MUTANTS) $(ADVERSARY_PROGRAMS) $(ADVERSARY_SEED)) && \
	  $(call adversary,2,adversary_resume $(RESUME_TEAMS) $(TEAM_FAULTS) $(ADVERSARY_SEED)); } & first=$$!; \
	{ $(call adversary,3,adversary $(ADVERSARY_MUTANTS) $(ADVERSARY_PROGRAMS) $$(($(ADVERSARY_SEED) + 1000000))) && \
	  $(call adversary,4,adversary_steps $(STEPS_TEAMS) $(TEAM_FAULTS) $(ADVERSARY_SEED)); } || failed=1; \
	wait $$first || failed=1; \
	[ $$failed = 0 ] || { cat adversary.*.log; exit 1; }
	@ADVERSARY_COUNTS=$(CURDIR)/build/adversary.5.counts $(MAKE) --no-print-directory check-adversary-threads
	@build/tests/adversary table build/adversary.*.counts

check-adversary-threads: setup
	@echo "check-adversary: $(THREADS_MUTANTS) missing edges in each of $(THREADS_PROGRAMS) programs on real threads"
	@$(call configure,build-tsan,-DQE_SANITIZE=thread -DQE_DEBUG=ON)
	@ninja -C build-tsan adversary_threads
	@$(FIXED_ADDRESSES) build-tsan/tests/adversary_threads $(THREADS_PROGRAMS) $(THREADS_MUTANTS) $(ADVERSARY_SEED)

check-crash: build
	@echo "check-crash: all cases"
	@ninja -C build check-crash

# The whole sweep is shared out among as many runs as there are processors; a sample (FAULTS_EVERY=7) is one run.
FAULTS_EVERY ?= 1
FAULTS_JOBS ?= $(shell nproc)
check-faults: build
	@ninja -C build check_faults
ifeq ($(FAULTS_EVERY),1)
	@echo "check-faults: every call that can fail, in $(FAULTS_JOBS) runs side by side"
	@sh tests/faults/sweep.sh build/tests/check_faults $(FAULTS_JOBS) build
else
	@echo "check-faults: each $(FAULTS_EVERY)th call that can fail"
	@build/tests/check_faults --every $(FAULTS_EVERY)
endif

.PHONY: check-analysis check-model
check-analysis:
	@sh tools/setup.sh cppcheck clang-tidy
	@echo "check-analysis: src/base src/core src/plan src/schedule src/step"
	@sh tools/analysis/analysis.sh build/analysis

check-model:
	@sh tools/setup.sh spin
	@echo "check-model: tests/model, every state"
	@sh tests/model/check_model.sh build/model

.PHONY: check-fuzz
FUZZ_SECONDS ?= 60
FUZZ_CLANG ?= $(firstword $(shell command -v clang clang-19 clang-16 clang-14 2>/dev/null))
check-fuzz: setup
	@if [ -z "$(FUZZ_CLANG)" ] || ! echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
	    "$(FUZZ_CLANG)" -x c -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null; then \
	    echo "check-fuzz: skipped: libFuzzer comes with clang (apt-get install clang libclang-rt-14-dev); make check" \
	         "replays the kept inputs"; exit 0; \
	fi; \
	echo "check-fuzz: build-fuzz/ with $(FUZZ_CLANG), address,undefined"; \
	$(call configure,build-fuzz,-DCMAKE_C_COMPILER=$(FUZZ_CLANG) -DQE_FUZZ=ON -DQE_DEBUG=ON \
	    -DQE_SANITIZE=$(MEMORY_SANITIZERS)) && ninja -C build-fuzz fuzz_all && \
	sh tests/fuzz/fuzz.sh build-fuzz $(FUZZ_SECONDS)

# Where there is no GPU the tests are built and skipped. TE=FOLDER: with the te backend (docs/te_backend.md).
TE ?=
check-gpu: setup
	@sh tools/cuda_deps.sh
	@echo "check-gpu: build-cuda/ with the cuda backend$(if $(TE), and Transformer Engine of $(TE))"
	@$(call configure,build-cuda,-DQE_CUDA=ON -DQE_TE=$(TE))
	@ninja -C build-cuda same_test_same check_gpu test_deposit test_attention_choice test_fused \
	    test_fused_input_grad test_fused_rope test_product_own qeffect_cli $(if $(TE),test_te)
	@echo "check-gpu: every op on host and device"; build-cuda/tests/test_same; status=$$?; \
	    if [ $$status = 77 ]; then echo "check-gpu: built; nothing was checked, for want of a GPU"; exit 0; fi; \
	    [ $$status = 0 ] || exit $$status; \
	    echo "check-gpu: which attention is chosen" && build-cuda/tests/test_attention_choice && \
	    echo "check-gpu: ops of two parts" && build-cuda/tests/test_fused && \
	    build-cuda/tests/test_fused_input_grad && build-cuda/tests/test_fused_rope && \
	    echo "check-gpu: products of ours" && build-cuda/tests/test_product_own && \
	    echo "check-gpu: where deposits are rounded" && build-cuda/tests/test_deposit --strict && \
	    echo "check-gpu: edges that are left out" && build-cuda/tests/check_gpu && \
	    echo "check-gpu: files that are broken" && \
	    QEFFECT=$(CURDIR)/build-cuda/qeffect python3 -B tests/end_to_end/test_device.py && \
	    echo "check-gpu: parity on the device" && build-cuda/qeffect verify --device cuda --rows short
ifneq ($(TE),)
	@echo "check-gpu: device te"; build-cuda/tests/test_te; status=$$?; [ $$status = 77 ] && exit 0; \
	    [ $$status = 0 ] || exit $$status; \
	    build-cuda/tests/test_same --te codec quantize swiglu attention && build-cuda/tests/test_deposit --te --strict && \
	    build-cuda/qeffect verify --device te --rows short && \
	    build-cuda/qeffect verify --device te --rows short --set model.kv_heads=2 --set model.sequence=128
endif

MUTANTS ?= 100
MUTANTS_SEED ?= 1
check-mutants: setup
	@echo "check-mutants: $(MUTANTS) faults in src/core"
	@python3 -B tests/mutants/mutants.py --count $(MUTANTS) --seed $(MUTANTS_SEED)

ORACLE_RANDOM ?= 1000000
ORACLE_SEED ?= 0
check-oracle: build
	@echo "check-oracle: all traces of each family, $(ORACLE_RANDOM) longer ones"
	@ninja -C build core_test_oracle
	@build/tests/core_test_oracle long $(ORACLE_RANDOM) $(ORACLE_SEED)

check-scale: build
	@echo "check-scale: traces of up to 10 million lines"
	@ninja -C build check-scale

check-sanitize: check-asan check-tsan

check-asan: setup
	@echo "check-asan: build-asan/ with address,undefined"
	@$(call configure,build-asan,-DQE_SANITIZE=$(MEMORY_SANITIZERS) -DQE_DEBUG=ON)
	@ninja -C build-asan
	@UBSAN_OPTIONS=print_stacktrace=1 \
	    ctest --test-dir build-asan --output-on-failure -j$(TEST_JOBS) --timeout $(SANITIZED_TEST_SECONDS)

check-tsan: setup
	@echo "check-tsan: build-tsan/ with thread"
	@$(call configure,build-tsan,-DQE_SANITIZE=thread -DQE_DEBUG=ON)
	@ninja -C build-tsan
	@TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 $(FIXED_ADDRESSES) \
	    ctest --test-dir build-tsan --output-on-failure -j$(TEST_JOBS) --timeout $(SANITIZED_TEST_SECONDS)

# Assertions of our own bugs have a branch that no test may take; they are not counted.
coverage:
	@sh tools/setup.sh gcovr
	@echo "coverage: build-coverage/"
	@$(call configure,build-coverage,-DQE_COVERAGE=ON -DCMAKE_BUILD_TYPE=Debug)
	@ninja -C build-coverage
	@find build-coverage -name '*.gcda' -delete
	@ctest --test-dir build-coverage --output-on-failure -j$(TEST_JOBS) --timeout $(SANITIZED_TEST_SECONDS)
	@for room in core plan step; do \
	    echo "coverage of src/$$room:"; \
	    gcovr --root . --object-directory build-coverage --filter "src/$$room/" \
        --exclude-lines-by-pattern '.*QE_ASSERT.*' \
	        --exclude-branches-by-pattern '.*(QE_ASSERT|QE_TRY).*' --print-summary 2>/dev/null | tail -3; \
	done

clean:
	@echo "clean: build/ build-cuda/ build-asan/ build-tsan/ build-coverage/ build-fuzz/"
	@rm -rf build build-cuda build-asan build-tsan build-coverage build-fuzz
