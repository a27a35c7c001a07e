"""A configuration that is wrong is refused with its file and line, before anything is trained or written."""
import json
import os
import subprocess
import unittest

from support import CONTRACT, ERROR, PROGRAM, SECONDS_MAX, TINY, USAGE, Case


def line_of(text, part):
    return text[:text.index(part)].count("\n") + 1


class HostileConfiguration(Case):
    def refuse_configuration(self, configuration, *words):
        self.write_tiny(configuration)
        before = sorted(os.listdir(self.folder))
        done = self.refuse(ERROR, ["tiny.yaml", *words], "train", "tiny.yaml")
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        return done

    def refuse_line(self, old, new, *words):
        """TINY with one line replaced is refused, and the complaint points at that line."""
        self.assertIn(old, TINY)
        configuration = TINY.replace(old, new, 1)
        return self.refuse_configuration(configuration, f"tiny.yaml:{line_of(configuration, new.strip())}", *words)

    def test_an_empty_configuration_is_refused(self):
        for content in ("", "\n\n", "# only a comment\n", "---\n"):
            with self.subTest(content=content):
                self.refuse_configuration(content)

    def test_a_missing_configuration_is_refused(self):
        self.refuse(ERROR, ["absent.yaml"], "train", "absent.yaml")

    def test_a_folder_is_no_configuration(self):
        os.mkdir(self.path("folder"))
        self.refuse(ERROR, ["folder"], "train", "folder")

    def test_what_is_not_a_mapping_is_refused(self):
        for content in ("42\n", "- a\n- b\n", "text\n", "model\n", "[1, 2]\n"):
            with self.subTest(content=content):
                self.refuse_configuration(content)

    def test_broken_yaml_is_refused(self):
        for content in ("model: [1, 2\n", "model:\n\tlayers: 2\n", "a: b: c\n", "\"open\n", "model: {layers: 2\n"):
            with self.subTest(content=content):
                self.refuse_configuration(content)

    def test_bytes_that_are_no_text_are_refused(self):
        for content in (b"\x00\x01\x02\x03" * 64, b"model:\n  layers: \xff\xfe\n", bytes(range(256))):
            with self.subTest(content=content[:16]):
                self.write("tiny.yaml", content)
                self.refuse(ERROR, ["tiny.yaml"], "train", "tiny.yaml")

    def test_anchors_tags_and_several_documents_are_refused(self):
        self.refuse_configuration("model: &m\n  layers: 2\ntrain: *m\n")
        self.refuse_configuration("model: !!python/object:os.system\n  layers: 2\n")
        self.refuse_configuration(TINY + "---\n" + TINY)

    def test_deep_nesting_and_huge_files_are_refused(self):
        self.refuse_configuration("model: " + "{a: " * 5000 + "1" + "}" * 5000 + "\n")
        self.refuse_configuration("# " + "x" * (2 << 20) + "\n" + TINY)

    def test_a_misspelt_key_is_refused_with_the_nearest_right_one(self):
        self.refuse_line("  layers: 2\n", "  layrs: 2\n", "layrs", "layers")
        self.refuse_line("  microbatches: 4\n", "  micro_batches: 4\n", "micro_batches", "microbatches")
        self.refuse_line("pipeline:\n", "pipelin:\n", "pipelin", "pipeline")

    def test_a_key_that_comes_twice_is_refused(self):
        self.refuse_configuration(TINY.replace("  layers: 2\n", "  layers: 2\n  layers: 2\n"), "tiny.yaml:3", "layers")

    def test_whole_numbers_are_read_strictly(self):
        for value in ("4x", "010", "nan", "4.0", "-1", "1e3", "0x10", "", "~", "true", "[4]", "{a: 4}", "\"4 \"",
                      "99999999999999999999999", "4 4", "4_000", ".inf"):
            with self.subTest(value=value):
                self.refuse_line("  layers: 2\n", f"  layers: {value}\n", "layers")

    def test_numbers_must_be_finite_and_possible(self):
        for key, value in (("learning_rate", "nan"), ("learning_rate", ".inf"), ("learning_rate", "-1e-3"),
                           ("learning_rate", "fast"), ("learning_rate", "1e999"), ("beta1", "1.0"), ("beta2", "1.5"),
                           ("weight_decay", "-0.1"), ("epsilon", "-1e-8"), ("gradient_clip", "-1")):
            with self.subTest(key=key, value=value):
                self.refuse_line("  warmup: 1\n", f"  warmup: 1\n  {key}: {value}\n".replace("  warmup: 1\n", ""), key)

    def test_sizes_of_zero_are_refused(self):
        for key in ("layers: 2", "hidden: 32", "heads: 2", "kv_heads: 1", "ffn: 64", "vocab: 256", "sequence: 16",
                    "ranks: 2", "chunks: 1", "microbatches: 4"):
            with self.subTest(key=key):
                name = key.split(":")[0]
                self.refuse_line(f"  {key}\n", f"  {name}: 0\n", name)

    def test_sizes_beyond_every_limit_are_refused(self):
        for key in ("layers: 2", "hidden: 32", "ffn: 64", "vocab: 256", "sequence: 16", "microbatches: 4", "ranks: 2"):
            with self.subTest(key=key):
                name = key.split(":")[0]
                self.refuse_line(f"  {key}\n", f"  {name}: 4294967295\n", name)

    def test_heads_must_divide_what_they_share(self):
        self.refuse_line("  heads: 2\n", "  heads: 3\n", "heads")
        self.refuse_configuration(TINY.replace("heads: 2", "heads: 4", 1).replace("kv_heads: 1", "kv_heads: 3"),
                                  "kv_heads")

    def test_more_stages_than_layers_are_refused(self):
        self.refuse_configuration(TINY.replace("ranks: 2", "ranks: 3"), "layers")

    def test_fewer_microbatches_than_a_schedule_needs_are_refused(self):
        self.refuse_configuration(TINY.replace("microbatches: 4", "microbatches: 1").replace("1f1b", "zbh1"),
                                  "microbatches")

    def test_an_unknown_schedule_or_word_is_refused_with_what_there_is(self):
        self.write_tiny(TINY.replace("schedule: 1f1b", "schedule: 1g1b"))
        self.refuse(ERROR, ["tiny.yaml:16", "1g1b", "1f1b"], "train", "tiny.yaml")
        self.refuse(ERROR, ["1g1b", "1f1b"], "train", "tiny.yaml", "--mode", "baseline")
        told = self.refuse(USAGE, ["1h1b", "1f1b", "auto,"], "train", "tiny.yaml", "--set", "pipeline.schedule=1h1b")
        self.assertNotIn("dualpipe,", told.stderr)  # which train refuses
        for slip, meant in (("1g1b", "1f1b"), ("dualpip", "dualpipev"), ("autp", "auto")):
            self.refuse(USAGE, [f"did you mean '{meant}'?"], "train", "tiny.yaml", "--set", f"pipeline.schedule={slip}")
            self.write_tiny(TINY.replace("schedule: 1f1b", f"schedule: {slip}"))
            self.refuse(ERROR, ["tiny.yaml:16", f"did you mean '{meant}'?"], "train", "tiny.yaml")
        self.refuse_line("  warmup: 1\n", "  mode: fast\n", "mode", "eager", "baseline")

    def test_what_is_refused_late_is_placed_too_whatever_else_the_command_line_sets(self):
        auto = TINY.replace("schedule: 1f1b", "schedule: auto\n  times: 1,1,1\n  memory_limit: 0")
        for configuration, line, word in (
                (TINY.replace("1f1b", "1g1b"), "schedule: 1g1b", "1g1b"),
                (TINY.replace("1f1b", "dualpipe"), "schedule: dualpipe", "use dualpipev"),
                (TINY.replace("  warmup: 1", "  memory_limit: 10"), "memory_limit: 10", "the limit is 10"),
                (auto.replace("1,1,1", "1,1"), "times: 1,1", "F,I,W"),
                (auto.replace("1,1,1", "1e99,1,1"), "times: 1e99", "0 to 1e30"),
                (auto.replace("limit: 0", "limit: 5"), "memory_limit: 5", "the memory limit is 5"),
                (auto.replace("  warmup: 1", "  memory_limit: 10"), "memory_limit: 10", "without any slot"),
                (auto.replace("microbatches: 4", "microbatches: 65536").replace("ranks: 2", "ranks: 64")
                 .replace("layers: 2", "layers: 320").replace("chunks: 1", "chunks: 5"), "microbatches:",
                 "at most 33554432 are taken")):
            self.write_tiny(configuration)
            words = [f"tiny.yaml:{line_of(configuration, line)}:", word]
            self.refuse(ERROR, words, "train", "tiny.yaml")
            self.refuse(ERROR, words, "train", "tiny.yaml", "--set", "train.seed=3", "--contracts", "observe")
        for configuration, others, words in (  # one is right whatever the other is
                (TINY.replace("1f1b", "zbv"), ("pipeline.microbatches=8",), ["tiny.yaml:16:", "exactly 2"]),
                (TINY.replace("1f1b", "interleaved"), ("pipeline.microbatches=1",), ["tiny.yaml:16:", "at least 2"]),
                (TINY.replace("1f1b", "zbh1").replace("microbatches: 4", "microbatches: 1"), ("pipeline.chunks=1",),
                 ["tiny.yaml:16:", "at least as many microbatches"])):
            self.write_tiny(configuration)
            given = [word for other in others for word in ("--set", other)]
            self.refuse(ERROR, words, "train", "tiny.yaml", *given)
        self.write_tiny(TINY.replace("1f1b", "zbv"))
        self.refuse(USAGE, ["exactly 2"], "train", "tiny.yaml", "--set", "pipeline.chunks=1")
        few = auto.replace("limit: 0", "limit: 5")
        self.write_tiny(few)
        for other in ("train.memory_limit=1000000000", "pipeline.times=2,1,1"):  # neither is what nothing obeys
            self.refuse(ERROR, [f"tiny.yaml:{line_of(few, 'memory_limit: 5')}:", "raise pipeline.memory_limit,"],
                        "train", "tiny.yaml", "--set", other)
        self.write_tiny(auto.replace("limit: 0", "limit: 1000000000"))
        limit, told = 300000, "without any slot"
        while "without any slot" in told:
            limit += 20000
            told = self.run_program("train", "tiny.yaml", "--memory-limit", str(limit)).stderr
        self.refuse(USAGE, ["least", "raise train.memory_limit,"], "train", "tiny.yaml", "--memory-limit", str(limit))
        self.write_tiny(TINY.replace("1f1b", "dualpipe"))
        self.refuse(ERROR, ["tiny.yaml:16:"], "train", "tiny.yaml", "--memory-limit", "1000000000")
        self.refuse(ERROR, ["tiny.yaml:16:"], "train", "tiny.yaml", "--set", "pipeline.microbatches=8")
        self.refuse(ERROR, ["tiny.yaml:16:"], "bench", "tiny.yaml")

    def test_a_wrong_value_on_the_command_line_is_a_usage_error(self):
        self.write_tiny()
        for assignment in ("model.layers=4x", "model.layers", "layers=2", "model.layrs=2", "=", "model.layers=",
                           "train.learning_rate=nan", "model=2"):
            with self.subTest(assignment=assignment):
                self.refuse(USAGE, [assignment.split("=")[0] or "--set"], "train", "tiny.yaml", "--set", assignment)


class ForeignBytes(Case):
    """Linux names are bytes. Whatever they are, --json answers with one JSON document."""

    def answer(self, *arguments):
        done = subprocess.run([os.fsencode(PROGRAM), *arguments, b"--json"], cwd=self.folder, stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=SECONDS_MAX, check=False)
        self.assertGreaterEqual(done.returncode, 0)
        return done.returncode, json.loads(done.stdout.decode("utf-8", "strict"))

    def test_errors_that_cite_bytes_that_are_no_text_are_json(self):
        self.write_tiny()
        for status, *arguments in (
                (ERROR, b"train", b"\xff.yaml"), (USAGE, b"train", b"--set", b"\xff=1"),
                (USAGE, b"train", b"--set", b"model.layers=\xff"), (USAGE, b"train", b"--\xff"), (USAGE, b"\xff"),
                (ERROR, b"train", b"tiny.yaml", b"--set", b"data.path=\xff"), (ERROR, b"check", b"\xff.csv"),
                (USAGE, b"schedule", b"\xff"), (ERROR, b"trace", b"check", b"\xff"), (ERROR, b"generate", b"\xff"),
                (USAGE, b"bench", b"--set", b"\xff=1")):
            with self.subTest(arguments=arguments):
                found, document = self.answer(*arguments)
                self.assertEqual(found, status)
                self.assertTrue(document["error"]["message"])

    def test_results_that_cite_bytes_that_are_no_text_are_json(self):
        self.write_tiny()
        status, document = self.answer(b"train", b"tiny.yaml", b"--set", b"checkpoint.path=\xff")
        self.assertEqual((status, document["checkpoint"]), (0, "\ufffd"))
        status, document = self.answer(b"generate", b"\xff", b"--prompt", b"a\xffb", b"-n", b"4")
        self.assertEqual((status, document["prompt"], len(document["tokens"])), (0, "a\ufffdb", 4))
        status, document = self.answer(b"train", b"tiny.yaml", b"--inject", b"slot.leak", b"--set",
                                       b"contracts.trace=\xff.qet")
        self.assertEqual((status, document["breach"]["trace"]), (CONTRACT, "\ufffd.qet"))
        status, document = self.answer(b"trace", b"check", b"\xff.qet")
        self.assertEqual((status, document["trace"]), (CONTRACT, "\ufffd.qet"))


class HostileData(Case):
    def refuse_data(self, content, *words):
        self.write_tiny()
        if content is None:
            os.remove(self.path("text.txt"))
        else:
            self.write("text.txt", content)
        self.refuse(ERROR, ["text.txt", *words], "train", "tiny.yaml")

    def test_a_missing_text_is_refused(self):
        self.refuse_data(None)

    def test_an_empty_text_is_refused(self):
        self.refuse_data("", "empty")

    def test_a_text_shorter_than_a_window_is_refused(self):
        self.refuse_data("In the be")

    def test_a_text_that_is_not_utf8_is_refused_with_its_line(self):
        self.refuse_data(b"In the\nbeginning \xff\n" * 400, "text.txt:2")

    def test_a_folder_is_no_text(self):
        self.write_tiny()
        os.remove(self.path("text.txt"))
        os.mkdir(self.path("text.txt"))
        self.refuse(ERROR, ["text.txt"], "train", "tiny.yaml")


class HostileSchedule(Case):
    def test_a_bad_cell_is_refused_with_row_and_column(self):
        for cell in ("0X0", "0F", "F0", "0F0F", "-1F0", "0F99999999999", "0F0;", "\x01"):
            with self.subTest(cell=cell):
                self.write("bad.csv", f"0F0,0F1,0B0,0B1\n1F0,{cell},1F1,1B1\n")
                self.refuse(ERROR, ["bad.csv:2"], "check", "bad.csv")

    def test_an_empty_or_missing_csv_is_refused(self):
        self.write("empty.csv", "")
        self.refuse(ERROR, ["empty.csv"], "check", "empty.csv")
        self.refuse(ERROR, ["absent.csv"], "check", "absent.csv")

    def test_a_schedule_that_cannot_run_is_answered_with_a_counterexample(self):
        self.write("stuck.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
        answer = self.document("check", "stuck.csv", status=CONTRACT)
        self.assertIn("schedule.cycle", str(answer))

    def test_a_missing_action_is_named(self):
        self.write("short.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
        answer = self.document("check", "short.csv", status=CONTRACT)
        self.assertIn("schedule.missing", str(answer))
        self.assertIn("1B1", str(answer))


if __name__ == "__main__":
    unittest.main(verbosity=2)
