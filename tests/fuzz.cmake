# Readers that are given whatever bytes: the kept inputs once more in every build; with -DQE_FUZZ=ON (clang) a libFuzzer
# program per reader. docs/testing.md.
set(fuzz_sources fuzz/files.c fuzz/fuzz.c fuzz/memory.c fuzz/no_cuda.c fuzz/texts.c ${cli_sources}
    ${CMAKE_SOURCE_DIR}/src/backend/cuda/choices.c ${CMAKE_SOURCE_DIR}/src/backend/cuda/attention_choice.c
    ${CMAKE_SOURCE_DIR}/src/backend/cuda/fused_choice.c ${CMAKE_SOURCE_DIR}/src/backend/cuda/product.c)
list(REMOVE_ITEM fuzz_sources ${CMAKE_SOURCE_DIR}/src/cli/main.c)
add_library(fuzz_targets OBJECT ${fuzz_sources})
target_compile_definitions(fuzz_targets PRIVATE QE_VERSION="${PROJECT_VERSION}")
# The text of choices is read without CUDA: fuzz/plain has as much of it as the text names.
target_include_directories(fuzz_targets PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/plain)
target_link_libraries(fuzz_targets PRIVATE PkgConfig::JANSSON)

function(qe_fuzz_program target source)
  add_executable(${target} ${source} $<TARGET_OBJECTS:fuzz_targets>)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE qeffect_store qeffect_config qeffect_data qeffect_local qeffect_host
                        qeffect_check qeffect PkgConfig::JANSSON)
endfunction()

if(QE_FUZZ)
  foreach(reader config csv trace safetensors manifest data times model choices)
    qe_fuzz_program(fuzz_${reader} fuzz/libfuzzer.c)
    target_compile_definitions(fuzz_${reader} PRIVATE QE_FUZZ_READER="${reader}")
    target_link_options(fuzz_${reader} PRIVATE -fsanitize=fuzzer)
    list(APPEND fuzz_programs fuzz_${reader})
  endforeach()
  add_custom_target(fuzz_all DEPENDS ${fuzz_programs})
else()
  qe_fuzz_program(fuzz_replay fuzz/replay.c)
  add_test(NAME fuzz/replay COMMAND fuzz_replay ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus)
endif()
