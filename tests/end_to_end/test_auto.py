"""Schedule `auto`: searched under times and memory, taken wherever a name is, refused where it cannot be."""
import json
import re
import unittest
import xml.etree.ElementTree

from support import ERROR, TINY, USAGE, Case

PROFILE = ("--ranks", "8", "--microbatches", "24", "--times", "29.718,29.444,19.927,0.527", "--weight-share", "0.4324")


class Auto(Case):
    def test_a_published_profile_is_no_worse_than_the_papers_scheduler(self):
        for limit, rate in ((8, .1323), (16, .0029)):
            answer = self.document("simulate", "auto", *PROFILE, "--memory-limit", str(limit), "--metric", "stage")
            self.assertLessEqual(answer["stage_bubble_rate"], rate + 5e-5)
            self.assertLessEqual(answer["peak_activation"], limit)

    def test_what_is_written_is_certified_and_simulated_to_the_same_figures(self):
        path = self.path("auto.csv")
        times = ("--times", "1,1.2,0.7,0.1")
        sizes = ("--ranks", "4", "--chunks", "2", "--microbatches", "8", *times, "--memory-limit", "3")
        done = self.succeed("schedule", "auto", *sizes, "-o", path)
        self.assertIn("orders tried", done.stderr)
        found = self.document("simulate", "auto", *sizes)
        again = self.document("simulate", path, *times)
        for figure in ("makespan", "stage_bubble", "peak_activation"):
            self.assertEqual(found[figure], again[figure], figure)
        certificate = self.document("check", path, "--memory-limit", "3")
        self.assertTrue(certificate["certified"])
        self.assertEqual(certificate["gradient_order"], "ascending")
        self.assertTrue(self.document("check", "auto", *sizes)["certified"])

    def test_every_placement_lives_where_it_says(self):
        def ranks_of(word):
            rows = self.document("schedule", "auto", "--ranks", "3", "--chunks", "2", "--microbatches", "4",
                                 "--stages", word)["orders"]
            place = {int(cell.rstrip("0123456789")[:-1]): rank for rank, row in enumerate(rows) for cell in row}
            return [place[stage] for stage in range(6)]
        self.assertEqual(ranks_of("looped"), [0, 1, 2, 0, 1, 2])
        self.assertEqual(ranks_of("v"), [0, 1, 2, 2, 1, 0])

    def test_its_picture_has_its_times(self):
        path = self.path("auto.svg")
        self.succeed("schedule", "auto", "--ranks", "4", "--microbatches", "8", "--times", "1,1.2,0.7,0.1", "--format",
                     "svg", "-o", path)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        xml.etree.ElementTree.fromstring(text)
        self.assertIn("times 1,1.2,0.7,0.1", text)
        self.assertIn("3W7", text)

    def train(self, *settings, mode="eager"):
        options = [word for setting in settings for word in ("--set", setting)]
        return self.document("train", self.config, "--mode", mode, *options)["state_hash"]

    def test_it_trains_to_the_bits_of_the_baseline(self):
        self.config = self.write_tiny(TINY.replace("layers: 2", "layers: 4"))
        auto = ("pipeline.schedule=auto", "pipeline.times=1,1.2,0.7,0.1")
        expected = self.train(mode="baseline")
        self.write("times", "1,1,1\n1,1.5,1\n1,2,1\n2,1,1\n")
        self.assertEqual(self.train(*auto), expected)
        self.assertEqual(self.train(*auto, mode="captured"), expected)
        self.assertEqual(self.train(*auto, mode="baseline"), expected)
        for stages in ("looped", "v"):
            self.assertEqual(self.train(*auto, "pipeline.chunks=2", f"pipeline.stages={stages}"), expected)
        self.assertEqual(self.train("pipeline.schedule=auto", "pipeline.times=times", "pipeline.chunks=2"), expected)

    def test_a_run_of_it_goes_on_under_a_named_schedule(self):
        self.config = self.write_tiny()
        whole = self.train("pipeline.schedule=auto", "pipeline.times=1,1.2,0.7", "checkpoint.every=1",
                           "checkpoint.path=run", "checkpoint.keep=0")
        named = ("train", "--resume", "run/step-00000001", "--set", "pipeline.schedule=zbh1")
        self.refuse(USAGE, ["pipeline.times=,"], *named)
        self.assertEqual(self.document(*named, "--set", "pipeline.times=")["state_hash"], whole)

    def test_it_takes_what_bench_measured(self):
        self.config = self.write_tiny()
        measured = self.document("bench", self.config, "--steps", "1", "--pairs", "1")
        self.write("bench.json", json.dumps(measured))
        found = self.document("simulate", "auto", "--ranks", "2", "--microbatches", "4", "--stage-times", "bench.json")
        work = [4 * sum(row[part] for part in ("forward_ms", "input_ms", "weight_ms"))
                for row in measured["stage_times"]]
        self.assertAlmostEqual(found["work"], max(work))
        self.assertEqual(self.train("pipeline.schedule=auto", "pipeline.times=bench.json"), self.train(mode="baseline"))

    def test_training_keeps_within_its_bytes_or_says_how_many_it_needs(self):
        self.config = self.write_tiny()
        auto = ("pipeline.schedule=auto", "pipeline.times=1,1.2,0.7")
        needs = ("train", self.config, *(word for setting in auto for word in ("--set", setting)))
        done = self.refuse(USAGE, ["least"], *needs, "--set", "pipeline.memory_limit=1000")
        least = int(re.search(r"least [a-z ]* is (\d+)", done.stderr).group(1))
        self.assertEqual(self.train(*auto, f"pipeline.memory_limit={4 * least}"), self.train(mode="baseline"))

    def test_settings_that_do_not_go_together_are_refused_at_their_place(self):
        self.write_tiny(TINY.replace("schedule: 1f1b", "schedule: auto"))
        self.refuse(ERROR, ["tiny.yaml:", "pipeline.times is empty"], "train", "tiny.yaml")
        self.write_tiny(TINY.replace("schedule: 1f1b", "schedule: 1f1b\n  stages: v"))
        self.refuse(ERROR, ["tiny.yaml:", "pipeline.stages is for schedule auto"], "train", "tiny.yaml")
        self.write_tiny()
        auto = ("train", "tiny.yaml", "--set", "pipeline.schedule=auto", "--set")
        self.refuse(USAGE, ["the times are '1,2'"], *auto, "pipeline.times=1,2")
        for slip in ("absent.json", "1;1;1"):
            self.refuse(ERROR, [slip, "No such file", "pipeline.times takes F,I,W"], *auto, f"pipeline.times={slip}")
        self.write("wrong.json", '{"stage_times": [{"forward_ms": 1}]}')
        self.refuse(ERROR, ["wrong.json", "times of 1 stage, the schedule has 2"], *auto, "pipeline.times=wrong.json")
        self.write("wrong.json", '{"stage_times": [{"forward_ms": 1}, {}]}')
        self.refuse(ERROR, ["wrong.json", "lacks forward_ms, input_ms or weight_ms"], *auto,
                    "pipeline.times=wrong.json")
        self.write("wrong.json", '{"stage_times": [')
        self.refuse(ERROR, ["wrong.json:1", "bench --json"], *auto, "pipeline.times=wrong.json")
        self.write("wrong.json", "{}")
        self.refuse(ERROR, ["wrong.json", "no \"stage_times\""], *auto, "pipeline.times=wrong.json")

    def test_a_limit_that_nothing_obeys_names_the_least_that_is(self):
        for command in ("schedule", "simulate", "check"):
            self.refuse(USAGE, ["least that any order obeys is 1"], command, "auto", "--memory-limit", "0.5")

    def test_options_that_do_not_fit_are_usage_errors(self):
        self.refuse(USAGE, ["--times", "F,I,W"], "schedule", "auto", "--times", "1,2")
        self.refuse(USAGE, ["--stages", "linear, looped or v"], "schedule", "auto", "--stages", "w")
        self.refuse(USAGE, ["--metric", "makespan or stage"], "schedule", "auto", "--metric", "step")
        self.refuse(USAGE, ["linear has 1"], "schedule", "auto", "--chunks", "2", "--stages", "linear")
        self.refuse(USAGE, ["--forward-only"], "schedule", "auto", "--forward-only")
        self.refuse(USAGE, ["--stages is for auto"], "schedule", "1f1b", "--stages", "v")
        self.refuse(USAGE, ["--memory-limit is for auto"], "schedule", "1f1b", "--memory-limit", "2")
        self.refuse(USAGE, ["--times is for auto"], "check", "1f1b", "--times", "1,1,1")
        self.refuse(USAGE, ["--metric is for auto"], "simulate", "1f1b", "--metric", "stage")
        self.assertEqual(json.loads(self.run_program("schedule", "auto", "--memory-limit", "0.5", "--json").stdout)
                         ["error"]["status"], "argument")


if __name__ == "__main__":
    unittest.main()
