"""Every command explains itself, and a slip on the command line is answered with the way to the explanation."""
import json
import unittest

from support import ERROR, GOOD, USAGE, Case

COMMANDS = (("train",), ("generate",), ("check",), ("schedule",), ("trace", "check"), ("bench",),
            ("verify",))


class Help(Case):
    def test_the_program_lists_every_command(self):
        done = self.succeed("--help")
        for command in COMMANDS:
            self.assertIn(" ".join(command), done.stdout)

    def test_every_command_teaches_usage_options_and_an_example(self):
        for command in COMMANDS:
            with self.subTest(command=command):
                text = self.succeed(*command, "--help").stdout
                self.assertIn("qeffect " + " ".join(command), text)
                self.assertIn("--json", text)
                self.assertGreaterEqual(text.count("qeffect " + " ".join(command)), 2, "usage, and an example")

    def test_help_fits_a_terminal(self):
        for command in ((),) + COMMANDS:
            for line in self.succeed(*command, "--help").stdout.split("\n"):
                self.assertLessEqual(len(line), 120, f"{command}: {line}")

    def test_without_a_command_the_program_says_how_to_use_it(self):
        self.refuse(USAGE, ["qeffect", "--help"])

    def test_an_unknown_command_is_a_usage_error_that_names_the_nearest(self):
        self.refuse(USAGE, ["trian", "train"], "trian")
        self.refuse(USAGE, ["'trace check'"], "trace", "x.qet")
        self.refuse(USAGE, ["'trian'", "did you mean 'train'?"], "help", "trian")
        for slip in ("version", "--versoin", "--versions"):
            self.refuse(USAGE, ["did you mean '--version'?"], slip)

    def test_help_of_a_command_is_what_its_option_says(self):
        for command in COMMANDS + (("bench", "layer"),):
            self.assertEqual(self.succeed("help", *command).stdout, self.succeed(*command, "--help").stdout)
        self.assertEqual(self.succeed("help").stdout, self.succeed("--help").stdout)

    def test_an_unknown_second_word_is_a_usage_error_unless_it_is_a_file(self):
        there = ["bench layer, bench placement, bench step, and bench alone"]
        self.refuse(USAGE, ["'bench layr'", "did you mean 'layer'?", *there], "bench", "layr")
        self.refuse(USAGE, ["did you mean 'step'?", *there], "bench", "setp", "tiny", "--way", "step")
        self.assertNotIn("did you mean", self.refuse(USAGE, there, "bench", "pizza").stderr)
        self.assertEqual(self.document("bench", "layr", status=USAGE)["error"]["status"], "argument")
        self.refuse(USAGE, ["'bench layr'", "did you mean 'layer'?", *there], "bench", "--pairs", "1", "layr")
        self.refuse(USAGE, ["before its options: bench layer"], "bench", "--pairs", "1", "layer")
        self.assertIn("qeffect bench [", self.succeed("bench", "--help", "layr").stdout)
        self.refuse(ERROR, ["layr.yaml", "no such file"], "bench", "layr.yaml")
        self.write("layr", "")
        self.refuse(ERROR, ["layr", "configuration is empty"], "bench", "layr")

    def test_an_unknown_option_is_a_usage_error(self):
        for command in COMMANDS:
            with self.subTest(command=command):
                self.refuse(USAGE, ["--no-such-option", "--help"], *command, "--no-such-option")

    def test_a_setting_that_is_given_as_an_option_is_answered_with_how_it_is_set(self):
        for option, key in (("--steps", "train.steps"), ("--seed=3", "train.seed"), ("--train.steps", "train.steps"),
                            ("--learning-rate", "train.learning_rate"), ("--recipe.name=bf16", "recipe.name")):
            self.refuse(USAGE, [f"did you mean --set {key}=VALUE?"], "train", option, "3")
        self.refuse(USAGE, ["did you mean --ranks?"], "check", "1f1b", "--rank", "3")  # which takes no settings
        for option in ("--step", "--train.", "--."):
            self.assertNotIn("--set train", self.refuse(USAGE, ["no option"], "train", option).stderr)

    def test_an_option_without_its_value_is_a_usage_error(self):
        self.refuse(USAGE, ["--ranks"], "schedule", "1f1b", "--ranks")

    def test_too_few_and_too_many_arguments_are_usage_errors(self):
        self.refuse(USAGE, ["--help"], "check")
        self.refuse(USAGE, ["--help"], "check", "1f1b", "gpipe")

    def test_numbers_on_the_command_line_are_read_strictly(self):
        for value in ("4x", "-1", "", "1e3", "99999999999999999999", "0x4", "4.0", "nan"):
            with self.subTest(value=value):
                self.refuse(USAGE, ["--ranks"], "schedule", "1f1b", f"--ranks={value}")

    def test_an_error_with_json_is_one_document(self):
        done = self.run_program("train", "absent.yaml", "--json")
        self.assertEqual(done.returncode, ERROR)
        self.assertIn("absent.yaml", json.dumps(json.loads(done.stdout)["error"]))

    def test_the_version_is_told(self):
        done = self.run_program("--version")
        self.assertEqual(done.returncode, GOOD)
        self.assertRegex(done.stdout, r"qeffect \d+\.\d+\.\d+")


if __name__ == "__main__":
    unittest.main(verbosity=2)
