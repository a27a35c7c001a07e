"""Every rule can be broken on purpose; the step is refused, nothing has moved, and the trace says the same again."""
import os
import re
import resource
import unittest

from support import CONTRACT, ERROR, ROOT, USAGE, Case

SHORT = ("--set", "train.steps=3", "--set", "checkpoint.path=", "--set", "contracts.trace=trap.qet")

SEALS = ("graph.address", "graph.constant")
# No step of a plan can break these: they are for traces and for other programs.
NOT_OF_A_STEP = ("sync.capture", "graph.unjoined", "graph.empty", "graph.stale", "graph.mode", "slot.alias",
                 "buffer.freed", "buffer.live", "sync.reuse", "rng.frozen", "rng.split", "step.nonfinite")


def rules():
    with open(os.path.join(ROOT, "docs", "rules.md"), encoding="utf-8") as file:
        return re.findall(r"(?m)^\| `([a-z]+\.[a-z]+)` \|", file.read())


class Traps(Case):
    def setUp(self):
        super().setUp()
        self.write_tiny()

    def injected(self, rule, *arguments):
        return self.document("train", "tiny.yaml", *SHORT, "--inject", rule, *arguments, status=CONTRACT)

    def test_the_list_of_rules_is_whole(self):
        self.assertGreaterEqual(len(rules()), 38)
        self.assertEqual(len(set(rules())), len(rules()))

    def test_every_rule_of_a_step_is_trapped_named_and_reproduced_from_its_trace(self):
        told = rules()
        expected = self.injected("slot.stale@2")["state_hash"]
        for rule in told:
            if rule.startswith(("schedule.", "checkpoint.")) or rule in NOT_OF_A_STEP:
                continue
            captured = ("--mode", "captured") if rule in SEALS else ()
            with self.subTest(rule=rule):
                if os.path.exists(self.path("trap.qet")):
                    os.remove(self.path("trap.qet"))
                answer = self.injected(f"{rule}@2", *captured)
                self.assertEqual(answer["breach"]["violations"][0]["rule"], rule)
                self.assertEqual((answer["steps"], answer["state_hash"]), (1, expected), "as the step before left it")
                self.assertEqual(answer["breach"]["trace"], "trap.qet")
                again = self.document("trace", "check", "trap.qet", status=CONTRACT)
                self.assertEqual(again["verdict"], rule)

    def test_a_broken_seal_is_trapped_in_captured_mode(self):
        expected = self.injected("slot.stale@2")["state_hash"]
        for rule in SEALS:
            for unit in ("layer", "action", "step"):
                answer = self.injected(f"{rule}@2", "--mode", "captured", "--set", f"train.capture={unit}")
                told = answer["breach"]["violations"][0]
                self.assertEqual(told["rule"], rule)
                self.assertEqual((answer["steps"], answer["state_hash"]), (1, expected), "as the step before left it")
                again = self.document("trace", "check", "trap.qet", status=CONTRACT)
                self.assertEqual(again["verdict"], rule)
                self.assertEqual([again["violations"][0][key] for key in ("object", "expected", "found")],
                                 [told[key] for key in ("object", "expected", "found")])

    def test_run_and_trace_tell_the_same_breaches(self):
        for rule in ("scale.busy", "slot.leak", "weight.twice", "cache.stale", "grad.twice", "sync.exit"):
            answer = self.injected(f"{rule}@1")
            again = self.document("trace", "check", "trap.qet", status=CONTRACT)
            # The trace begins with a snapshot, so clocks count on from there; how far apart two things are stays.
            told, told_again = ([(breach["rule"], breach.get("object"), breach["expected"] - breach["found"])
                                 for breach in breaches]
                                for breaches in (answer["breach"]["violations"], again["violations"]))
            self.assertEqual(told, told_again, rule)

    def test_a_rule_of_schedules_is_refused_before_anything_runs(self):
        for rule in rules():
            if not rule.startswith("schedule.") or rule == "schedule.memory":  # no limit is asked of train
                continue
            with self.subTest(rule=rule):
                answer = self.injected(rule)
                self.assertEqual(answer["counterexample"]["rule"], rule)
                done = self.refuse(CONTRACT, [rule, "before anything ran"], "train", "tiny.yaml", "--inject", rule)
                self.assertNotIn("step 1/", done.stderr)
        self.assertFalse(os.path.exists(self.path("trap.qet")))

    def test_a_fault_that_cannot_be_planted_is_an_error_and_not_a_run_without_it(self):
        for arguments in (("schedule.cycle", "--set", "pipeline.ranks=1"), ("sync.side", "--mode", "baseline"),
                          ("graph.address",), ("graph.constant", "--mode", "baseline"),
                          *((rule, "--mode", "captured") for rule in NOT_OF_A_STEP if rule != "step.nonfinite")):
            done = self.run_program("train", "tiny.yaml", *SHORT, "--inject", *arguments)
            self.assertEqual(done.returncode, ERROR, arguments)
            self.assertIn(arguments[0], done.stderr)
        self.injected("schedule.place", "--set", "pipeline.ranks=1")
        self.refuse(USAGE, ["4", "train.steps is 3"], "train", "tiny.yaml", *SHORT, "--inject", "slot.leak@4")

    def test_a_loss_that_is_not_finite_stops_the_step_or_is_skipped_and_counted(self):
        answer = self.injected("step.nonfinite@2")
        self.assertEqual(answer["breach"]["violations"][0]["rule"], "step.nonfinite")
        self.assertEqual((answer["steps"], answer["state_hash"]), (1, self.injected("slot.stale@2")["state_hash"]))
        skipped = self.document("train", "tiny.yaml", *SHORT, "--inject", "step.nonfinite@2", "--set",
                                "train.nonfinite=skip")
        self.assertEqual((skipped["steps"], skipped["vetoed"]), (3, 1))

    def test_people_read_both_operations_the_state_and_the_next_step(self):
        done = self.run_program("train", "tiny.yaml", *SHORT, "--inject", "sync.side@2")
        self.assertEqual(done.returncode, CONTRACT)
        self.assertRegex(done.stderr, r"(?m)^rank \d+: sync\.side: ")
        self.assertRegex(done.stderr, r"are those of step 1: state_hash [0-9a-f]{32}")
        self.assertIn("qeffect trace check trap.qet", done.stderr)
        again = self.run_program("trace", "check", "trap.qet")
        self.assertEqual(again.returncode, CONTRACT)
        self.assertRegex(again.stdout, r"(?m)^trap\.qet:\d+: sync\.side: ")

    def test_no_weights_are_kept_of_a_trapped_run(self):
        self.run_program("train", "tiny.yaml", "--set", "checkpoint.path=model", "--inject", "grad.twice")
        self.assertFalse(os.path.exists(self.path("model")))

    def observed(self, rule, *arguments):
        """Of a run that went on, and what `trace check` says of its trace."""
        if os.path.exists(self.path("trap.qet")):
            os.remove(self.path("trap.qet"))
        # An observed fault is not stopped: a missing edge races for real, which ThreadSanitizer would rightly report.
        quiet = {"TSAN_OPTIONS": f"{os.environ.get('TSAN_OPTIONS', '')}:report_bugs=0"}
        answer = self.document("train", "tiny.yaml", *SHORT, "--inject", rule, "--contracts", "observe", *arguments,
                               environment=quiet)
        self.assertEqual((answer["steps"], answer["trace"]), (3, "trap.qet"))
        return answer, self.document("trace", "check", "trap.qet", status=CONTRACT)

    def test_under_observe_every_rule_is_told_the_run_goes_on_and_the_trace_tells_the_same(self):
        for rule in rules():
            if rule.startswith(("schedule.", "checkpoint.")) or rule in NOT_OF_A_STEP:
                continue
            with self.subTest(rule=rule):
                answer, again = self.observed(f"{rule}@3", *(("--mode", "captured") if rule in SEALS else ()))
                in_step = [breach for breach in answer["observed"] if breach["during"] == "training"]
                self.assertEqual(answer["observed"][0]["rule"], rule)
                self.assertEqual(again["verdict"], rule)
                told, told_again = ([(breach["rule"], breach.get("object"), breach["expected"], breach["found"])
                                     for breach in breaches] for breaches in (in_step, again["violations"]))
                self.assertEqual(told, told_again)
                self.assertEqual(sum(breach["count"] for breach in in_step), again["violation_count"])

    def test_a_trace_that_cannot_be_written_is_told_with_its_path(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        for contracts, status in ("trap", CONTRACT), ("observe", 0):
            done = self.run_program("train", "tiny.yaml", *SHORT, "--inject", "grad.twice@2", "--contracts", contracts,
                                    "--set", "contracts.trace=large.qet", preexec_fn=limit)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertRegex(done.stderr, r"(?m)^no trace was written to large\.qet: .*File too large")

    def test_what_is_observed_in_several_steps_is_told_once_with_its_count(self):
        answer, again = self.observed("graph.address@2", "--mode", "captured")
        told = [breach for breach in answer["observed"] if breach["during"] == "training"]
        self.assertEqual(len(told), len(again["violations"]))
        self.assertEqual({(breach["rule"], breach["step"]) for breach in told}, {("graph.address", 2)})
        self.assertEqual([breach["count"] for breach in told], [2 * breach["count"] for breach in again["violations"]])
        done = self.succeed("train", "tiny.yaml", *SHORT, "--inject", "slot.owner@2", "--contracts", "observe")
        self.assertRegex(done.stderr, r"(?m)^observed 1 time, first in training, step 2: rank \d+: slot\.owner: ")
        self.assertIn("qeffect trace check trap.qet", done.stderr)

    def test_a_right_run_says_the_same_bits_whatever_the_contracts(self):
        hashes = set()
        for contracts in ("trap", "observe", "off"):
            answer = self.document("train", "tiny.yaml", *SHORT, "--contracts", contracts)
            self.assertEqual(answer.get("observed"), [] if contracts == "observe" else None)
            self.assertNotIn("trace", answer)
            self.assertEqual(answer["full_checks"], 0)
            self.assertEqual(answer["certified_checks"] > 0, contracts != "off")
            hashes.add(answer["state_hash"])
        self.assertEqual(len(hashes), 1)
        self.assertFalse(os.path.exists(self.path("trap.qet")))

    def test_a_slip_in_a_rule_is_a_usage_error_with_the_nearest(self):
        self.refuse(USAGE, ["scale.bussy", "scale.busy"], "train", "tiny.yaml", "--inject", "scale.bussy")
        for step in ("0", "x", "", "-1"):
            self.refuse(USAGE, ["scale.busy"], "train", "tiny.yaml", "--inject", f"scale.busy@{step}")
        self.refuse(USAGE, ["contracts"], "train", "tiny.yaml", "--inject", "scale.busy", "--contracts", "off")


class Traces(Case):
    def test_a_broken_trace_is_refused_with_its_line_and_column(self):
        self.write("a.qet", "this is no trace\n")
        self.refuse(ERROR, ["a.qet:1"], "trace", "check", "a.qet")
        self.refuse(ERROR, ["absent.qet"], "trace", "check", "absent.qet")
        self.write("b.qet", bytes(range(256)))
        self.refuse(ERROR, ["b.qet"], "trace", "check", "b.qet")

    def test_a_trace_that_was_cut_anywhere_is_judged_or_refused_and_never_crashes(self):
        self.write_tiny()
        self.run_program("train", "tiny.yaml", *SHORT, "--inject", "slot.leak")
        with open(self.path("trap.qet"), "rb") as file:
            whole = file.read()
        for part in range(1, 12):
            self.write("cut.qet", whole[:len(whole) * part // 12])
            self.assertIn(self.run_program("trace", "check", "cut.qet").returncode, (0, ERROR, CONTRACT))


if __name__ == "__main__":
    unittest.main(verbosity=2)
