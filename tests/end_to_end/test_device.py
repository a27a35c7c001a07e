"""What a person may get wrong with --device cuda where there is a GPU. Skipped, saying so, where there is none."""
import random
import unittest

import support

MODEL = support.TINY.replace("hidden: 32", "hidden: 128").replace("ffn: 64", "ffn: 128").replace(
    "sequence: 16", "sequence: 64").replace("steps: 3", "steps: 1")
TITLE = "qeffect choices 1"


def changed(line, field, to):
    """The line with another field, by number."""
    fields = line.split("\t")
    fields[field] = to
    return "\t".join(fields)


class Device(support.Case):
    def setUp(self):
        super().setUp()
        self.write("gpu.yaml", MODEL)
        self.write("text.txt", support.sample_text(20000))
        first = self.train("choices")
        if "there is no NVIDIA driver" in first.stderr or "no GPU is to be had" in first.stderr:
            print("skipped: no GPU is to be had")
            self.skipTest("no GPU")
        if "built without it" in first.stderr:
            print("skipped: a build without the cuda backend")
            self.skipTest("built without the cuda backend")
        self.assertEqual(first.returncode, support.GOOD, first.stderr)
        with open(self.path("choices"), encoding="utf-8") as file:
            self.lines = file.read().splitlines()
        self.assertEqual(self.lines[0], TITLE)

    def train(self, algorithms, *more):
        return self.run_program("train", "gpu.yaml", "--device", "cuda", "--set", "checkpoint.path=", "--set",
                                f"train.algorithms={algorithms}", *more)

    def with_file(self, content):
        self.write("broken", content if isinstance(content, bytes) else "\n".join(content) + "\n")
        return self.train("broken")

    def refused(self, name, content, words):
        """In the words of what is wrong with the file, not of what is missing behind it, and with a way out."""
        with self.subTest(name):
            run = self.with_file(content)
            self.assertEqual(run.returncode, support.ERROR, f"{name}: {run.stderr}")
            self.assertIn(words, run.stderr, name)
            self.assertIn("broken", run.stderr, name)
            self.assertIn("what to do", run.stderr, name)

    def test_a_broken_file_of_choices_is_refused_in_words(self):
        lines, whole = self.lines, "\n".join(self.lines).encode() + b"\n"
        product = next(line for line in lines if "\tlinear" in line)
        attention = next(line for line in lines if "\tattention_backward" in line)
        rest = [line for line in lines if line != product]
        self.refused("cut short", whole[:-30], "not a choice")
        self.refused("nothing", b"", "not a file of choices")
        self.refused("no title", lines[1:], "not a file of choices")
        self.refused("zeros", b"\0" * 4096, "not a file of choices")
        self.refused("a zero within", whole[:-40] + b"\0" + whole[-40:], "not a choice")
        self.refused("a huge line", whole + b"x" * (1 << 20) + b"\n", "not a choice")
        self.refused("another device", lines + [changed(product, 1, "NVIDIA H100")], "NVIDIA H100")
        self.refused("another library", lines + [changed(product, 0, "cuBLASLt 1.2.3")], "cuBLASLt 1.2.3")
        self.refused("two ways", lines + [changed(product, 4, " ".join(["%016x" % 1] * 8))], "another algorithm")
        for key, words in (("linear m1 n1", "names no product"),
                           ("linear m0 n16 k16 tn e4m3 e4m3 fast", "empty product"),
                           ("linear m15 n16 k16 tn e4m3 e4m3 fast", "multiples of 16")):
            self.refused(key, lines + [changed(product, 2, key)], words)
        for shape in "s0 t0 h0 kv0 d0", "s1 t64 h2 kv0 d64", "s1 t64 h3 kv2 d64", "s1 t64 h2 kv2 d7":
            self.refused(shape, lines + [changed(attention, 2, f"attention_backward {shape} fixed")], "")
        self.refused("no algorithm of attention", rest + [changed(attention, 4, " ".join(["%016x" % 7] * 8))], "")
        self.refused("a product missing", rest, "names no algorithm for")

    def test_a_file_of_choices_with_every_line_twice_is_honoured(self):
        run = self.with_file(self.lines + self.lines[1:])
        self.assertEqual(run.returncode, support.GOOD, run.stderr)

    def test_words_that_name_no_algorithm_are_refused_or_run(self):
        source = random.Random(5)
        for number in range(6):
            lines = list(self.lines)
            at = source.randrange(1, len(lines))
            words = lines[at].split("\t")[4].split()
            for _ in range(1 + number):
                words[source.randrange(8)] = "%016x" % (source.getrandbits(64) >> source.randrange(64))
            lines[at] = changed(lines[at], 4, " ".join(words))
            run = self.with_file(lines)
            self.assertIn(run.returncode, (support.GOOD, support.ERROR), f"{lines[at]}\n{run.stderr}")
            if run.returncode == support.ERROR:
                self.assertIn("what to do", run.stderr)

    def test_a_timeline_is_refused_before_the_work_or_written_for_every_rank(self):
        run = self.train("choices", "--set", "train.timeline=/nonexistent/timeline.json")
        self.assertEqual(run.returncode, support.ERROR, run.stderr)
        self.assertIn("/nonexistent/timeline.json", run.stderr)
        self.assertEqual(run.stdout, "")
        run = self.train("choices", "--set", "train.timeline=timeline.json")
        self.assertEqual(run.returncode, support.GOOD, run.stderr)
        for name in "timeline.json", "timeline.json.1":
            with open(self.path(name), encoding="utf-8") as file:
                self.assertIn('"ph":"X"', file.read(), name)


if __name__ == "__main__":
    unittest.main()
