"""Training as a user sees it: what is printed, what is left behind, and that the same program gives the same bits."""
import json
import os
import struct
import subprocess
import unittest

from support import CONTRACT, ERROR, PROGRAM, ROOT, SECONDS_MAX, TINY, USAGE, Case

# Four stages, so that two ranks may hold two each.
FOUR = TINY.replace("layers: 2", "layers: 4")
HEX_32 = r"^[0-9a-f]{32}$"


def read_safetensors(path):
    """name -> (dtype, shape, bytes)"""
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], content[8 + length:][slice(*entry["data_offsets"])])
            for name, entry in header.items()}


class Output(Case):
    def test_a_pipe_gets_plain_lines_of_progress_and_the_result(self):
        self.write_tiny()
        done = self.succeed("train", "tiny.yaml", "--set", "checkpoint.path=model")
        self.assertNotRegex(done.stderr + done.stdout, "[\r\x1b]")
        self.assertRegex(done.stderr, r"(?m)^step 1/3  loss \d+\.\d+  \d+ tokens/s  \d+:\d\d left$")
        self.assertRegex(done.stderr, r"(?m)^step 3/3  loss ")
        self.assertRegex(done.stderr, r"(?m)^step 3  validation \d+\.\d+$")
        self.assertRegex(done.stdout, r"(?m)^done after 3 steps: loss \d+\.\d+, validation \d+\.\d+ nats/token")
        self.assertRegex(done.stdout, r"(?m)^state_hash [0-9a-f]{32}$")
        self.assertIn("qeffect generate model", done.stdout)

    def test_a_terminal_gets_one_line_that_moves(self):
        self.write_tiny()
        ours, theirs = os.openpty()
        with open(theirs, "wb") as terminal:
            done = subprocess.run([PROGRAM, "train", "tiny.yaml", "--set", "checkpoint.path="], cwd=self.folder,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal, check=False,
                                  timeout=SECONDS_MAX)
        with open(ours, "rb", buffering=0) as screen:
            seen = screen.read(4096).decode()
        self.assertEqual(done.returncode, 0)
        self.assertRegex(seen, "\r\x1b\\[Kstep 1/3  loss .* left\r\x1b\\[Kstep 3/3  loss .* left\r\n")

    def test_the_check_device_trains_with_the_bits_of_the_host_and_says_that_it_looked(self):
        self.write_tiny()
        run = ("train", "tiny.yaml", "--set", "checkpoint.path=", "--set", "train.steps=1")
        host, check = self.document(*run), self.document(*run, "--device", "check")
        self.assertEqual(check["state_hash"], host["state_hash"])
        self.assertEqual(check["backend"], "check on " + host["backend"])
        refused = self.run_program("train", "tiny.yaml", "--device", "chekc")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("host, check", refused.stderr)

    def test_the_host_says_which_settings_it_has_no_use_for(self):
        self.write_tiny()
        run = ("train", "tiny.yaml", "--set", "checkpoint.path=", "--set", "train.steps=1")
        plain = self.succeed(*run)
        self.assertNotIn("--device cuda", plain.stderr)
        values = {"train.algorithms": "chosen", "train.timeline": "line.json", "train.nvtx": "true",
                  "train.deterministic": "false", "recipe.forward": "split", "recipe.input_grad": "fast",
                  "recipe.weight_grad": "fast", "contracts.order": "true"}
        given = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        told = self.succeed(*run, *given)
        for key in values:
            self.assertIn(f"{key} is for a GPU (--device cuda); on this device it does nothing\n", told.stderr)
        self.assertEqual(told.stdout.split("state_hash")[1], plain.stdout.split("state_hash")[1])

    def test_settings_that_do_nothing_beside_the_others_are_told(self):
        self.write_tiny()
        run = ("train", "tiny.yaml", "--set", "checkpoint.path=", "--set", "train.steps=1")

        def told(*assignments):
            given = [word for assignment in assignments for word in ("--set", assignment)]
            lines = self.succeed(*run, *given).stderr.splitlines()
            return [line.split(" is for ") for line in lines if line.endswith("; in this run it does nothing")]

        self.assertEqual(told(), [])
        idle = ("train.capture=step", "recipe.history=8", "recipe.margin=1", "recipe.amax=most_recent",
                "train.evaluate_every=2", "train.evaluate_sequences=1", "contracts.trace=x.qet", "checkpoint.keep=1")
        lines = told("recipe.name=bf16", "data.validation=0", "contracts.mode=off", *idle)
        self.assertEqual(sorted(key for key, _ in lines), sorted(setting.split("=")[0] for setting in idle))
        self.assertIn(["train.capture", "train.mode captured; in this run it does nothing"], lines)
        self.assertIn(["recipe.history", "recipe.name delayed; in this run it does nothing"], lines)
        self.assertEqual([key for key, _ in told("train.mode=captured", *idle)], ["checkpoint.keep"])
        self.assertEqual(told("recipe.name=bf16", "train.capture=action", "recipe.history=4"), [])  # the defaults
        other = ("pipeline.cache_weights=false", "pipeline.placement=copy")
        self.assertEqual(told(*other), [])
        self.assertEqual([key for key, _ in told("train.mode=baseline", *other)], [s.split("=")[0] for s in other])
        self.assertEqual(told("data.validation=0", "train.evaluate_every=0", "contracts.mode=off", "contracts.trace="),
                         [])  # off twice

    def test_a_device_that_the_program_was_built_without_says_what_it_needs(self):
        self.write_tiny()
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            self.assertIn("\n## On a GPU\n", file.read())
        for device, meant in ("CUDA", "cuda"), ("hots", "host"), ("checks", "check"):
            self.refuse(USAGE, [f"did you mean '{meant}'?"], "train", "tiny.yaml", "--device", device)
        for device, option in ("cuda", "-DQE_CUDA=ON"), ("te", "-DQE_TE=FOLDER"):
            with self.subTest(device=device):
                run = self.run_program("train", "tiny.yaml", "--device", device, "--set", "checkpoint.path=",
                                       environment={"QE_TE": os.path.join(self.folder, "nothing")})
                if run.returncode == 2:  # not built
                    self.assertRegex(run.stderr, f"'{device}'.*built without it; it has host, check")
                    self.assertRegex(run.stderr, f"what to do: .*README.md, \"On a GPU\".*{option}")
                elif run.returncode == 1:  # built; no GPU, or, behind it, no Transformer Engine
                    self.assertRegex(run.stderr, "GPU|driver|Transformer Engine|cuDNN")
                else:
                    self.assertEqual((device, run.returncode), ("cuda", 0))

    def test_json_is_one_document_with_units_in_its_keys(self):
        self.write_tiny()
        told = self.document("train", "tiny.yaml", "--set", "checkpoint.path=model")
        self.assertRegex(told["state_hash"], HEX_32)
        self.assertEqual((told["steps"], told["vetoed"], told["interrupted"]), (3, 0, False))
        self.assertEqual([point["step"] for point in told["loss_curve"]], [1, 2, 3])
        self.assertEqual(told["loss"], told["loss_curve"][-1]["loss"])
        self.assertGreater(told["tokens_per_s"], 0)
        self.assertGreater(told["step_ms"], 0)
        self.assertGreater(told["certified_checks"], 3 * 100)
        self.assertEqual(told["full_checks"], 0)
        self.assertEqual(told["checkpoint"], "model")
        self.assertTrue(told["backend"].startswith("host "))
        self.assertEqual([rank["rank"] for rank in told["memory"]], [0, 1])
        self.assertTrue(all(rank["slot_bytes"] > 0 and rank["state_bytes"] > 0 for rank in told["memory"]))
        # Untrained, a byte costs about log 256 = 5.55 nats; three steps must already have taught something.
        self.assertAlmostEqual(told["loss_curve"][0]["loss"], 5.55, delta=0.1)
        self.assertLess(told["validation_loss"], told["loss_curve"][0]["loss"])

    def test_without_a_checkpoint_path_nothing_is_left_and_that_is_said(self):
        self.write_tiny()
        done = self.succeed("train", "tiny.yaml", "--set", "checkpoint.path=")
        self.assertIn("no weights were kept", done.stdout)
        self.assertEqual(sorted(os.listdir(self.folder)), ["text.txt", "tiny.yaml"])

    def test_what_cannot_be_written_to_standard_output_is_an_error(self):
        self.write_tiny()
        for json_too in ((), ("--json",)):
            with open("/dev/full", "wb") as full:
                done = self.run_program("train", "tiny.yaml", "--set", "checkpoint.path=", *json_too, stdout=full)
            self.assertEqual(done.returncode, ERROR, json_too)
            self.assertIn("standard output", done.stderr)


class SameBits(Case):
    def told(self, *arguments, **options):
        return self.document("train", "tiny.yaml", "--set", "checkpoint.path=", *arguments, **options)

    def hash_of(self, *arguments, **options):
        told = self.told(*arguments, **options)
        return told["state_hash"], told["loss"], told["validation_loss"]

    def test_schedules_modes_placements_caches_and_contracts_do_not_change_a_bit(self):
        self.write_tiny(FOUR)
        expected = self.hash_of("--mode", "baseline")
        for arguments in (
                (), (),
                ("--set", "pipeline.schedule=gpipe"),
                ("--set", "pipeline.schedule=zbh1"),
                ("--set", "pipeline.schedule=interleaved", "--set", "pipeline.chunks=2"),
                ("--set", "pipeline.schedule=zbh2"),
                ("--set", "pipeline.schedule=interleaved-zb", "--set", "pipeline.chunks=2"),
                ("--set", "pipeline.schedule=zbv", "--set", "pipeline.chunks=2"),
                ("--set", "pipeline.schedule=v-half", "--set", "pipeline.chunks=2"),
                ("--set", "pipeline.schedule=v-min", "--set", "pipeline.chunks=2"),
                ("--set", "pipeline.schedule=dualpipev", "--set", "pipeline.chunks=2"),
                ("--set", "pipeline.schedule=1f1b", "--set", "pipeline.ranks=4"),
                ("--set", "pipeline.schedule=1f1b", "--set", "pipeline.ranks=1"),
                ("--placement", "copy"),
                ("--set", "pipeline.cache_weights=false"),
                ("--contracts", "observe"),
                ("--contracts", "off")):
            with self.subTest(arguments=arguments):
                self.assertEqual(self.hash_of(*arguments), expected)

    def test_a_file_with_pairs_and_transfers_trains_to_the_same_bits_and_a_wrong_transfer_is_refused(self):
        self.write_tiny(FOUR)
        expected = self.hash_of("--mode", "baseline")
        moves = self.succeed("schedule", "dualpipev", "--ranks", "2", "--microbatches", "4", "--format",
                             "compute_comms").stdout
        self.write("moves.csv", moves)
        self.assertIn("OVERLAP_F_B", moves)
        for mode in ("eager", "captured"):
            self.assertEqual(self.hash_of("--mode", mode, "--set", "pipeline.schedule=moves.csv"), expected)
        self.write("moves.csv", moves.replace("0SEND_F1,", "", 1))
        self.refuse(CONTRACT, ["moves.csv:1:", "schedule.missing: 0F1", "has no SEND_F"], "train", "tiny.yaml", "--set",
                    "pipeline.schedule=moves.csv")
        self.write("moves.csv", moves.replace("0SEND_F1,", "0SEND_F1;,", 1))
        self.refuse(ERROR, ["moves.csv:1:", "0SEND_F1;", "nothing after"], "train", "tiny.yaml", "--set",
                    "pipeline.schedule=moves.csv")

    def test_what_graphs_replace_and_cost_is_told_and_grows_with_slots_alone(self):
        self.write_tiny(FOUR)
        line = (r"(?m)^captured  \d+ graphs of \d+ ops for \d+ launches a step, in \d+\.\d+ s; [\d.]+ KiB, "
                r"[\d.]+ a slot$")
        told = self.succeed("train", "tiny.yaml", "--mode", "captured").stdout
        self.assertRegex(told, line)
        self.assertNotRegex(self.succeed("train", "tiny.yaml").stdout, r"(?m)^captured")
        one, two = (self.document("train", "tiny.yaml", "--mode", "captured", "--set",
                                  f"pipeline.microbatches={count}")["captured"] for count in (8, 16))
        self.assertNotIn("captured", self.document("train", "tiny.yaml"))
        for key in ("graphs", "slots", "ops", "bytes"):
            self.assertGreater(one[key], 0)
            self.assertEqual(one[key], two[key], key)
        self.assertGreater(two["launches"], one["launches"])
        self.assertGreater(one["seconds"], 0)

    def test_a_schedule_that_holds_every_stage_twice_is_refused_with_one_that_does_not(self):
        self.write_tiny(FOUR)
        for mode in ("eager", "captured"):
            self.refuse(USAGE, ["weights of every stage on two ranks", "use dualpipev"], "train", "tiny.yaml", "--mode",
                        mode, "--set", "pipeline.schedule=dualpipe")
        self.succeed("schedule", "dualpipe", "--ranks", "2", "--microbatches", "4", "-o", "both.csv")
        self.refuse(ERROR, ["both.csv: ", "use dualpipev"], "train", "tiny.yaml", "--set", "pipeline.schedule=both.csv")

    def test_every_recipe_repeats_itself_and_differs_from_the_others(self):
        self.write_tiny(FOUR)
        seen = set()
        for recipe in ("delayed", "current", "block", "bf16", "fp32"):
            chosen = ("--set", f"recipe.name={recipe}")
            found = self.hash_of(*chosen)
            self.assertEqual(self.hash_of(*chosen, "--mode", "baseline"), found, recipe)
            seen.add(found[0])
        self.assertEqual(len(seen), 5)

    def test_another_seed_gives_other_bits(self):
        self.write_tiny()
        self.assertNotEqual(self.hash_of("--set", "train.seed=1"), self.hash_of("--set", "train.seed=2"))

    def test_a_schedule_from_a_csv_gives_the_bits_of_its_name(self):
        self.write_tiny()
        expected = self.hash_of()
        self.succeed("schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "-o", "x.csv")
        self.assertEqual(self.hash_of("--set", "pipeline.schedule=x.csv"), expected)
        os.rename(self.path("x.csv"), self.path("orders"))
        self.assertEqual(self.hash_of("--set", "pipeline.schedule=orders"), expected)
        # Somebody else's order: all forwards first, I and W apart, some W late.
        self.write("y.csv", "0F0,0F1,0F2,0F3,0I0,0I1,0W0,0I2,0W1,0I3,0W2,0W3\n"
                            "1F0,1B0,1F1,1I1,1F2,1I2,1F3,1I3,1W1,1W2,1W3\n")
        self.assertEqual(self.hash_of("--set", "pipeline.schedule=y.csv"), expected)
        self.assertEqual(self.hash_of("--set", "pipeline.schedule=y.csv", "--mode", "baseline"), expected)

    def test_a_csv_that_does_not_fit_the_configuration_is_refused(self):
        self.write_tiny()
        self.succeed("schedule", "1f1b", "--ranks", "2", "--microbatches", "6", "-o", "x.csv")
        self.refuse(ERROR, ["x.csv", "microbatches", "6", "4"], "train", "tiny.yaml", "--set",
                    "pipeline.schedule=x.csv")
        self.succeed("schedule", "interleaved", "--ranks", "2", "--chunks", "2", "--microbatches", "4", "-o", "y.csv")
        self.refuse(ERROR, ["y.csv", "4 stages", "2 layers"], "train", "tiny.yaml", "--set",
                    "pipeline.schedule=y.csv")

    def test_a_processor_without_vector_instructions_trains_to_the_same_bits(self):
        self.write_tiny()
        expected = self.told()
        portable = self.told(environment={"QE_HOST_LEVEL": "portable"})
        self.assertIn("portable", portable["backend"])
        self.assertEqual(portable["state_hash"], expected["state_hash"])
        # Matrix products of an old core are other bits, but nearly the same numbers.
        old = self.told(environment={"QE_HOST_LEVEL": "portable", "OPENBLAS_CORETYPE": "Nehalem"})
        self.assertAlmostEqual(old["loss"], expected["loss"], delta=0.02)

    def test_an_unknown_level_is_refused_with_the_levels_there_are(self):
        self.write_tiny()
        self.refuse(ERROR, ["QE_HOST_LEVEL", "sse9", "portable", "avx2"], "train", "tiny.yaml",
                    environment={"QE_HOST_LEVEL": "sse9"})

    def test_activation_memory_does_not_grow_with_microbatches(self):
        self.write_tiny()
        for schedule in ("1f1b", "zbh1", "zbh2"):
            slots = []
            for microbatches in (4, 8, 16):
                told = self.told("--set", f"pipeline.schedule={schedule}", "--set",
                                 f"pipeline.microbatches={microbatches}", "--set", "train.steps=1")
                slots.append([rank["slot_bytes"] for rank in told["memory"]])
            self.assertEqual(slots[0], slots[1], schedule)
            self.assertEqual(slots[1], slots[2], schedule)


class Files(Case):
    def test_initial_weights_are_dumped_under_their_hugging_face_names(self):
        self.write_tiny()
        for name, steps in (("a.safetensors", 3), ("b.safetensors", 1)):
            self.succeed("train", "tiny.yaml", "--dump-initial", name, "--dump-batches", "batches.safetensors",
                         "--dump-steps", "2", "--set", f"train.steps={steps}", "--set", "checkpoint.path=model")
        first = read_safetensors(self.path("a.safetensors"))
        self.assertEqual(first, read_safetensors(self.path("b.safetensors")))
        self.assertEqual(first["model.embed_tokens.weight"][:2], ("F32", [256, 32]))
        self.assertEqual(first["model.layers.1.self_attn.k_proj.weight"][:2], ("F32", [16, 32]))
        self.assertEqual(first["model.layers.0.input_layernorm.weight"][2], struct.pack("<32f", *[1.0] * 32))
        trained = read_safetensors(self.path("model/model.safetensors"))
        self.assertEqual({n: t[:2] for n, t in trained.items()}, {n: t[:2] for n, t in first.items()})
        self.assertNotEqual(trained["lm_head.weight"], first["lm_head.weight"])
        batches = read_safetensors(self.path("batches.safetensors"))
        self.assertEqual(batches["tokens"][:2], ("I32", [2, 4, 16]))
        self.assertEqual(batches["tokens"][2][4:64], batches["targets"][2][:60], "targets are tokens shifted by one")

    def test_a_number_of_batches_without_a_file_for_them_is_a_usage_error(self):
        self.write_tiny()
        self.refuse(USAGE, ["--dump-batches"], "train", "tiny.yaml", "--dump-steps", "2")

    def test_dumped_weights_are_a_model_that_generate_reads(self):
        self.write_tiny()
        self.succeed("train", "tiny.yaml", "--dump-initial", "initial.safetensors", "--set", "checkpoint.path=model")
        trained = self.document("generate", "model", "-n", "8", "-t", "0")["tokens"]
        os.replace(self.path("initial.safetensors"), self.path("model/model.safetensors"))
        untrained = self.document("generate", "model", "-n", "8", "-t", "0")["tokens"]
        self.assertEqual(len(untrained), 8)
        self.assertNotEqual(trained, untrained)

    def test_text_with_characters_of_several_bytes_trains(self):
        self.write_tiny()
        self.write("text.txt", "Im Anfang schuf Gott Himmel und Erde; äöü ß – 起初神創造天地 🌍\n" * 60)
        self.assertEqual(self.document("train", "tiny.yaml", "--set", "checkpoint.path=")["steps"], 3)

    def shard(self, tokens, magic=20240520, version=1, count=None):
        head = struct.pack("<3i", magic, version, len(tokens) if count is None else count).ljust(1024, b"\0")
        return head + struct.pack(f"<{len(tokens)}H", *tokens)

    def test_token_shards_train_and_a_larger_vocabulary_is_used(self):
        self.write_tiny(TINY.replace("text.txt", "tokens.bin").replace("vocab: 256", "vocab: 300"))
        self.write("tokens.bin", self.shard([(7 * i * i + i) % 300 for i in range(2000)]))
        told = self.document("train", "tiny.yaml", "--set", "checkpoint.path=")
        self.assertAlmostEqual(told["loss_curve"][0]["loss"], 5.70, delta=0.1)

    def test_broken_token_shards_are_refused(self):
        self.write_tiny(TINY.replace("text.txt", "tokens.bin"))
        good = [i % 256 for i in range(2000)]
        for content, word in ((self.shard(good)[:-1], "cut short"), (self.shard(good, count=1999), "header"),
                              (self.shard(good, version=2), "version"), (self.shard(good + [256]), "vocab"),
                              (self.shard(good, count=-1), "-1"), (self.shard(good)[:100], "header"),
                              (self.shard([]), "at least 1")):
            self.write("tokens.bin", content)
            with self.subTest(word=word):
                self.refuse(ERROR, ["tokens.bin", word], "train", "tiny.yaml")

    def test_a_text_that_cannot_be_read_is_refused_with_the_reason(self):
        self.write_tiny(TINY.replace("text.txt", "/proc/self/mem"))
        self.refuse(ERROR, ["/proc/self/mem"], "train", "tiny.yaml")
        if os.geteuid() != 0:  # root reads everything
            self.write_tiny()
            os.chmod(self.path("text.txt"), 0)
            self.refuse(ERROR, ["text.txt", "permission"], "train", "tiny.yaml")


class Generate(Case):
    def setUp(self):
        super().setUp()
        self.write_tiny()
        self.succeed("train", "tiny.yaml", "--set", "train.steps=20", "--set", "train.learning_rate=1e-2", "--set",
                     "checkpoint.path=model")

    def test_a_prompt_is_continued_and_the_same_seed_continues_it_the_same_way(self):
        ask = ("generate", "model", "--prompt", "light and ", "--tokens", "24")
        first = self.document(*ask, "--seed", "5")
        self.assertEqual(first["prompt"], "light and ")
        self.assertEqual(len(first["tokens"]), 24)
        self.assertEqual(self.document(*ask, "--seed", "5"), first)
        self.assertNotEqual(self.document(*ask, "--seed", "6")["tokens"], first["tokens"])

    def test_at_temperature_zero_the_seed_does_not_matter(self):
        ask = ("generate", "model", "--prompt", "light and ", "--tokens", "24")
        first = self.document(*ask, "--temperature", "0", "--seed", "5")
        self.assertEqual(self.document(*ask, "--temperature", "0", "--seed", "6"), first)
        self.assertEqual(self.document(*ask, "--temperature", "1", "--top-k", "1"), first, "the likeliest of one")

    def test_text_goes_to_standard_output_behind_its_prompt(self):
        done = self.succeed("generate", "model", "--prompt", "light and ", "--tokens", "40", "--top-k", "3")
        self.assertTrue(done.stdout.startswith("light and "))
        # Twenty steps teach which bytes there are.
        self.assertLess(set(done.stdout), set("lightandewasuponrykbm,.\n evf"))

    def test_contracts_do_not_change_a_text(self):
        self.write_tiny()
        self.succeed("train", "tiny.yaml", "--set", "train.steps=1", "--set", "checkpoint.path=model")
        texts = [self.document("generate", "model", "-n", "6", "--contracts", contracts)["tokens"]
                 for contracts in ("trap", "observe", "off")]
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[0], texts[2])
        self.refuse(USAGE, ["contracts.mode", "never"], "generate", "model", "--contracts", "never")

    def test_what_is_no_model_is_refused(self):
        self.refuse(ERROR, ["absent/config.json", "train first", "checkpoint.path"], "generate", "absent")
        os.mkdir(self.path("empty"))
        self.refuse(ERROR, ["empty"], "generate", "empty")
        with open(self.path("model/model.safetensors"), "r+b") as file:
            file.truncate(5000)
        self.refuse(ERROR, ["model.safetensors"], "generate", "model")


class StrangeOrders(Case):
    """Orders from elsewhere: captured, they end with the bits that they have eagerly."""

    ORDER = """\
2F0,2F1,2F2,2B0,2B1,2B2
0F0,0F1,0F2,0B0,0B1,0B2
4F1,4F0,4F2,4B0,4B1,4B2
1F0,1F1,1F2,3F1,3F2,3F0,3B0,3B1,1B0,3B2,1B1,1B2
"""

    def test_the_same_ops_on_slots_of_different_owners_do_not_share_a_graph(self):
        self.write_tiny()
        self.write("order.csv", self.ORDER)
        settings = ("model.layers=8", "pipeline.schedule=order.csv", "pipeline.ranks=4", "pipeline.microbatches=3",
                    "checkpoint.path=")
        words = [word for setting in settings for word in ("--set", setting)]
        eager = self.document("train", "tiny.yaml", *words)["state_hash"]
        for unit in ("layer", "action", "step"):
            with self.subTest(unit=unit):
                captured = self.document("train", "tiny.yaml", *words, "--mode", "captured", "--set",
                                         f"train.capture={unit}")
                self.assertEqual(captured["state_hash"], eager)


class Memory(Case):
    def test_a_limit_on_memory_refuses_before_anything_is_taken_and_says_what_lowers_it(self):
        self.write_tiny()
        told = self.document("train", "tiny.yaml", "--set", "train.steps=1", "--set", "checkpoint.path=")
        for rank in told["memory"]:
            self.assertEqual(rank["foretold"], rank["taken"])
        most = max(rank["foretold"]["total_bytes"] for rank in told["memory"])
        once = ("--set", "train.steps=1", "--set", "checkpoint.path=")
        self.document("train", "tiny.yaml", *once, "--memory-limit", str(most))
        self.refuse(USAGE, ["rank", "masters", "slots for I", str(most - 1)], "train", "tiny.yaml", *once,
                    "--memory-limit", str(most - 1))
        self.refuse(USAGE, ["more ranks"], "train", "tiny.yaml", *once, "--memory-limit", "1000")

    def test_auto_keeps_below_the_limit_and_gives_the_same_bits(self):
        self.write_tiny()
        once = ("--set", "train.steps=2", "--set", "checkpoint.path=", "--set", "pipeline.microbatches=6")
        plenty = self.document("train", "tiny.yaml", *once, "--set", "pipeline.schedule=gpipe")
        most = max(rank["foretold"]["total_bytes"] for rank in plenty["memory"]) - 1000
        self.refuse(USAGE, ["auto"], "train", "tiny.yaml", *once, "--set", "pipeline.schedule=gpipe",
                    "--memory-limit", str(most))
        found = self.document("train", "tiny.yaml", *once, "--set", "pipeline.schedule=auto", "--set",
                              "pipeline.times=1,1,1", "--memory-limit", str(most))
        self.assertLessEqual(max(rank["taken"]["total_bytes"] for rank in found["memory"]), most)
        self.assertEqual(found["state_hash"], plenty["state_hash"])

    def test_auto_fits_wherever_a_named_order_does(self):
        self.write_tiny()
        once = ("--set", "train.steps=1", "--set", "checkpoint.path=", "--set", "pipeline.microbatches=6")
        named = self.document("train", "tiny.yaml", *once, "--set", "pipeline.schedule=zbh1")
        most = max(rank["foretold"]["total_bytes"] for rank in named["memory"])
        found = self.document("train", "tiny.yaml", *once, "--set", "pipeline.schedule=auto", "--set",
                              "pipeline.times=1,1.2,0.7", "--memory-limit", str(most))
        self.assertLessEqual(max(rank["taken"]["total_bytes"] for rank in found["memory"]), most)


if __name__ == "__main__":
    unittest.main(verbosity=2)
