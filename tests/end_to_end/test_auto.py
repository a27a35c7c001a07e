"""Schedule `auto`: searched under times and memory, taken wherever a name is, refused where it cannot be."""
import json
import unittest
import xml.etree.ElementTree

from support import USAGE, Case

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
