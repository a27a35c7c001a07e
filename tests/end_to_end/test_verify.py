"""`qeffect verify`: the parity matrix holds, covers what it says it covers, and finds a difference that is planted.

What a list of rows covers is computed here from the rows alone, by brute force: nothing is shared with the generator.
"""
import itertools
import unittest

from support import CONTRACT, DIFFERS, ERROR, USAGE, Case

EXECUTIONS = ["eager", "layer", "action", "step"]
TWO_CHUNKS = ["interleaved", "interleaved-zb", "zbv", "v-half", "v-min", "1f1b-v", "dualpipev"]
SCHEDULES = ["gpipe", "1f1b", "zbh1", "zbh2", *TWO_CHUNKS]
OWN_ORDER = "looped-bfs"
STAGES = [1, 2, 4]
NUMERICS = [("delayed", 1), ("delayed", 2), ("delayed", 4), ("current", 0), ("block", 0), ("bf16", 0), ("fp32", 0)]
FACTORS = {
    "execution": EXECUTIONS, "schedule": SCHEDULES, "stages": STAGES, "numeric": NUMERICS, "uneven": [False, True],
    "cache": [True, False], "placement": ["direct", "copy"], "contracts": ["trap", "off"],
}


def choices(row):
    """A row's level of every factor."""
    return {
        "execution": row.get("capture", row["mode"]), "schedule": row["schedule"], "stages": row["stages"],
        "numeric": (row["recipe"], row.get("history", 0)), "uneven": row["layers"] % 4 != 0,
        "cache": row["cache_weights"], "placement": row["placement"], "contracts": row["contracts"],
    }


def possible(levels):
    """One stage is not two on a rank, and has no neighbour with more layers."""
    return levels.get("stages") != 1 or (levels.get("schedule") not in TWO_CHUNKS and not levels.get("uneven"))


def uncovered(rows, strength):
    """Combinations of `strength` levels that are in no row."""
    have = [choices(row) for row in rows if row["mode"] != "baseline"]
    missing = []
    for names in itertools.combinations(FACTORS, strength):
        seen = {tuple(levels[name] for name in names) for levels in have}
        for levels in itertools.product(*(FACTORS[name] for name in names)):
            if possible(dict(zip(names, levels))) and levels not in seen:
                missing.append(dict(zip(names, levels)))
    return missing


class Rows(Case):
    def rows(self, which):
        return self.document("verify", "--list", "--rows", which)["rows"]

    def test_short_has_every_pair_of_choices(self):
        self.assertEqual(uncovered(self.rows("short"), 2), [])

    def test_full_has_every_three_choices_and_a_hundred_rows(self):
        rows = self.rows("full")
        self.assertEqual(uncovered(rows, 3), [])
        self.assertGreaterEqual(sum(row["mode"] != "baseline" for row in rows), 100)

    def test_full_has_every_execution_on_every_schedule_and_stages_with_delayed_scaling(self):
        plain = {"numeric": ("delayed", 4), "uneven": False, "cache": True, "placement": "direct", "contracts": "trap"}
        have = [choices(row) for row in self.rows("full")]
        for execution, schedule, stages in itertools.product(EXECUTIONS, SCHEDULES, STAGES):
            levels = {"execution": execution, "schedule": schedule, "stages": stages, **plain}
            if possible(levels):
                self.assertIn(levels, have)

    def test_a_combination_that_is_missing_would_be_seen(self):
        rows = self.rows("short")
        self.assertNotEqual(uncovered([row for row in rows if row["schedule"] != "zbh1"], 2), [])
        self.assertNotEqual(uncovered(rows, 3), [])

    def test_every_row_is_compared_with_a_baseline_of_its_own_numbers(self):
        for which in ("short", "full"):
            rows = self.rows(which)
            self.assertEqual([row["row"] for row in rows], list(range(1, len(rows) + 1)))
            for row in rows:
                baseline = rows[row["baseline_row"] - 1]
                self.assertLessEqual(baseline["row"], row["row"])
                mode = "eager" if row["schedule"] == OWN_ORDER else "baseline"
                self.assertEqual((baseline["mode"], baseline["process"]), (mode, "here"))
                self.assertEqual(baseline["schedule"] == OWN_ORDER, row["schedule"] == OWN_ORDER)
                for key in ("layers", "recipe", "history"):
                    self.assertEqual(baseline.get(key), row.get(key))

    def test_an_order_of_its_own_is_run_in_every_way_and_held_against_itself(self):
        for which, numbers in (("short", 1), ("full", len(NUMERICS))):
            rows = [row for row in self.rows(which) if row["schedule"] == OWN_ORDER]
            self.assertEqual(len({row["baseline_row"] for row in rows}), numbers)
            for execution in EXECUTIONS:
                self.assertEqual(sum(choices(row)["execution"] == execution and row["row"] != row["baseline_row"]
                                     for row in rows), numbers)

    def test_baseline_eager_and_every_capture_unit_also_run_in_new_processes(self):
        for which in ("short", "full"):
            fresh = {choices(row)["execution"] for row in self.rows(which) if row["process"] == "fresh"}
            self.assertEqual(fresh, {"baseline", *EXECUTIONS})


class Verify(Case):
    def test_every_row_holds_the_bits_of_its_baseline_through_steps_that_try_them(self):
        told = self.document("verify", "--rows", "short")
        self.assertEqual(told["rows_run"], told["rows_planned"])
        self.assertGreaterEqual(told["equal"], 35)
        self.assertEqual(told["equal"] + told["baselines"], told["rows_run"])
        self.assertEqual((told["differing"], told["refused"]), (0, 0))
        hashes = {}
        for row in told["rows"]:
            self.assertTrue(row["equal"])
            self.assertRegex(row["state_hash"], "^[0-9a-f]{32}$")
            self.assertEqual(row["state_hash"], row["baseline_hash"])
            key = (row["layers"], choices(row)["numeric"], row["schedule"] == OWN_ORDER)
            hashes.setdefault(key, set()).add(row["state_hash"])
        self.assertEqual(len(set().union(*hashes.values())), len(hashes), "other numbers give other bits")
        self.assertEqual(len(hashes), 2 * len(NUMERICS) + 1)
        self.assertTrue(told["exercised"])
        delayed = [row for row in told["rows"] if row["recipe"] == "delayed" and "exercise" in row]
        self.assertEqual(len(delayed), 7)
        for row in delayed:
            scales = 4 * 3 * row["layers"]
            self.assertEqual(row["exercise"], {"scales": scales, "rose": scales, "fell": scales,
                                               "zero_microbatch": True, "infinite_amax": True})

    def test_a_planted_bit_is_found_with_its_row_step_and_tensor(self):
        told = self.document("verify", "--rows", "short", "--plant", "9@6", status=DIFFERS)
        self.assertEqual((told["rows_run"], told["differing"]), (9, 1), "the first that differs ends the run")
        row = told["rows"][-1]
        self.assertFalse(row["equal"])
        self.assertNotEqual(row["state_hash"], row["baseline_hash"])
        self.assertEqual((row["difference"]["step"], row["difference"]["tensors"]), (6, 1))
        self.assertEqual(row["difference"]["first"], row["difference"]["tensor"])
        self.assertTrue(row["difference"]["tensor"].endswith(".weight"))
        done = self.run_program("verify", "--rows", "short", "--plant", "9@6", "--jobs", "1")
        self.assertEqual(done.returncode, DIFFERS)
        self.assertIn("DIFFERS", done.stdout)
        self.assertIn(f"differs first in step 6: {row['difference']['tensor']} (tensors that differ then: 1)",
                      done.stdout)

    def test_a_bit_planted_in_a_new_process_is_found(self):
        fresh = [row["row"] for row in self.document("verify", "--list", "--rows", "short")["rows"]
                 if row["process"] == "fresh" and row["mode"] == "captured"]
        told = self.document("verify", "--rows", "short", "--plant", f"{fresh[-1]}@12", status=DIFFERS)
        row = told["rows"][-1]
        self.assertEqual((row["row"], row["process"], row["difference"]["step"]), (fresh[-1], "fresh", 12))

    def test_keep_runs_every_row_though_one_differs(self):
        told = self.document("verify", "--rows", "short", "--plant", "11", "--keep", status=DIFFERS)
        self.assertEqual(told["rows_run"], told["rows_planned"])
        self.assertEqual(told["differing"], 1)

    def test_a_row_alone_gives_the_numbers_of_the_run(self):
        alone = self.document("verify", "--rows", "short", "--row", "9")
        other = self.document("verify", "--rows", "short", "--row", "1")
        self.assertEqual(len(alone["loss"]), 12)
        for key in ("loss", "gradient_norm", "state_hash", "tensors"):
            self.assertEqual(alone[key], other[key])
        self.assertIn(alone["state_hash"], self.succeed("verify", "--rows", "short", "--row", "9").stdout)

    def test_a_configuration_gives_the_sizes_and_its_data_are_not_needed(self):
        self.write("wide.yaml", "model: {hidden: 48, vocab: 300}\ndata: {path: absent.txt}\nrecipe: {margin: 1}\n")
        other = self.document("verify", "wide.yaml", "--rows", "short", "--row", "9")
        plain = self.document("verify", "--rows", "short", "--row", "9")
        self.assertNotEqual(other["state_hash"], plain["state_hash"])
        self.assertEqual(other, self.document("verify", "wide.yaml", "--rows", "short", "--row", "1") | {"row": 9})

    def test_contracts_are_those_of_every_row_that_is_checked_in_new_processes_too(self):
        usual = self.document("verify", "--list", "--rows", "short")["rows"]
        for words in (["--contracts", "observe"], ["--contracts", "off"], ["--set", "contracts.mode=observe"]):
            with self.subTest(words=words):
                mode = words[1].split("=")[-1]
                told = self.document("verify", "--rows", "short", *words)
                self.assertEqual([row["contracts"] for row in told["rows"]],
                                 ["off" if row["contracts"] == "off" else mode for row in usual])
                self.assertEqual(told["equal"] + told["baselines"], len(usual))
        self.refuse(USAGE, ["contracts.mode", "loud"], "verify", "--contracts", "loud")

    def test_slips_are_refused(self):
        for words in (["--rows", "some"], ["--jobs", "0"], ["--jobs=x"], ["--plant", "0"], ["--plant", "100000"],
                      ["--plant", "3@13"], ["--plant", "3@"], ["--plant", "x"], ["--row", "100000"],
                      ["--device", "abacus"], ["--set", "model.heads=5"]):
            with self.subTest(words=words):
                self.refuse(USAGE, [words[0].split("=")[0]] if words[0] != "--set" else ["model.heads"],
                            "verify", *words)
        self.refuse(ERROR, ["pipeline.microbatches"], "verify", "--set", "pipeline.microbatches=5")
        self.refuse(ERROR, ["absent.yaml"], "verify", "absent.yaml")

    def test_a_row_that_cannot_train_is_told_and_no_parity_is_claimed(self):
        done = self.run_program("verify", "--rows", "short", "--set", "train.learning_rate=10", "--set",
                                "train.weight_decay=10", "--set", "train.gradient_clip=0", "--set", "train.warmup=0",
                                "--set", "train.epsilon=1e-30", "--set", "train.minimum_learning_rate=10")
        self.assertEqual(done.returncode, CONTRACT)
        self.assertIn("row 1 ", done.stderr)
        self.assertIn("step.nonfinite", done.stderr)
        self.assertNotIn("exercise", done.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
