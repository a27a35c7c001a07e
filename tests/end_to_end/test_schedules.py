"""`schedule` and `check`: orders go out as CSV and come back certified; faults come back as facts."""
import os
import resource
import unittest

from support import CONTRACT, ERROR, USAGE, Case, is_sanitized


def limit_memory():
    if not is_sanitized():
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))


class Schedules(Case):
    def test_every_named_schedule_is_written_and_certified(self):
        for name, chunks in (("gpipe", 1), ("looped-bfs", 3), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1),
                             ("zbh2", 1), ("interleaved-zb", 2), ("zbv", 2), ("v-half", 2), ("v-min", 2), ("1f1b-v", 2),
                             ("dualpipev", 2), ("sequential", 3)):
            with self.subTest(name=name):
                sizes = ("--ranks", "3", "--chunks", str(chunks), "--microbatches", "6")
                text = self.succeed("schedule", name, *sizes).stdout
                self.assertEqual(len(text.splitlines()), 3)
                self.succeed("schedule", name, *sizes, "-o", "orders.csv")
                with open(self.path("orders.csv"), encoding="utf-8") as file:
                    self.assertEqual(file.read(), text)
                answer = self.document("check", "orders.csv")
                self.assertTrue(answer["certified"])
                self.assertEqual(answer["stages"], 3 * chunks)
                self.assertEqual(answer["microbatches"], 6)

    def test_the_certificate_tells_what_each_rank_keeps(self):
        answer = self.document("check", "zbh1", "--ranks", "4", "--microbatches", "12")
        self.assertEqual([rank["peak_live_microbatches"] for rank in answer["per_rank"]], [4, 4, 4, 4])
        self.assertEqual([rank["peak_pending_weights"] for rank in answer["per_rank"]], [1, 2, 3, 4])
        self.assertIn("certified", self.succeed("check", "zbh1", "--ranks", "4", "--microbatches", "12").stdout)

    def test_a_circle_is_told_with_its_places(self):
        self.write("stuck.csv", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
        facts = self.document("check", "stuck.csv", status=CONTRACT)["counterexample"]
        self.assertEqual(facts["rule"], "schedule.cycle")
        self.assertEqual([action["action"] for action in facts["actions"]], ["0B0", "1B0", "1F1", "0F1"])
        self.assertEqual([(action["row"], action["cell"]) for action in facts["actions"]],
                         [(1, 2), (2, 3), (2, 2), (1, 3)])
        done = self.run_program("check", "stuck.csv")
        self.assertEqual(done.returncode, CONTRACT)
        self.assertIn("schedule.cycle: 4 actions wait for each other", done.stdout)

    def test_a_transport_decides_whether_an_order_can_run(self):
        sizes = ("1f1b", "--ranks", "4", "--microbatches", "8")
        self.assertTrue(self.document("check", *sizes)["certified"])
        answer = self.document("check", *sizes, "--communicators", "one", status=CONTRACT)
        self.assertEqual((answer["rules"]["communicators"], answer["rules"]["capacity"]), ("one", 0))
        facts = answer["counterexample"]
        self.assertEqual(facts["rule"], "schedule.cycle")
        self.assertEqual([(at["action"], at["part"], at["waits"]) for at in facts["actions"]],
                         [("0F3", "send", "queue"), ("1B0", "send", "queue")])
        self.assertTrue(self.document("check", *sizes, "--communicators", "one", "--sends", "batched")["certified"])
        self.assertTrue(self.document("check", *sizes, "--communicators", "one", "--capacity", "1")["certified"])
        self.assertEqual(self.document("check", *sizes, "--buffers")["least_capacity"], 1)

    def test_memory_folds_fills_and_gradient_order_are_part_of_the_certificate(self):
        sizes = ("--ranks", "4", "--microbatches", "8")
        self.assertTrue(self.document("check", "zbh1", *sizes, "--memory-limit", "4")["certified"])
        facts = self.document("check", "zbh1", *sizes, "--memory-limit", "3.9", status=CONTRACT)["counterexample"]
        self.assertEqual((facts["rule"], facts["expected"], facts["found"]), ("schedule.memory", 3, 4))
        self.assertEqual([at["action"] for at in facts["actions"]], ["0F0", "0F1", "0F2", "0F3"])
        facts = self.document("check", "zbh1", *sizes, "--fold", "last-microbatch", status=CONTRACT)["counterexample"]
        self.assertEqual((facts["rule"], [at["action"] for at in facts["actions"]]), ("scale.busy", ["0I7", "0W7"]))
        self.assertEqual(self.document("check", "looped-bfs")["gradient_order"], "own")
        facts = self.document("check", "looped-bfs", "--gradients", "ascending", status=CONTRACT)["counterexample"]
        self.assertEqual((facts["rule"], facts["actions"][0]["action"]), ("grad.order", "4B7"))
        self.write("late.csv", "0F1,0F0,0B1,0B0\n")
        facts = self.document("check", "late.csv", "--fill", "first-microbatch", status=CONTRACT)["counterexample"]
        self.assertEqual((facts["rule"], [at["action"] for at in facts["actions"]]), ("cache.empty", ["0F1", "0F0"]))
        self.refuse(USAGE, ["--sends", "single or batched", "both"], "check", "1f1b", "--sends", "both")
        self.refuse(USAGE, ["--memory-limit", "-1"], "check", "1f1b", "--memory-limit=-1")

    def test_large_schedules_are_certified_in_little_time_and_memory(self):
        """Half a second of a processor, 7 where coverage is counted, 16 with a sanitizer, by no clock."""
        for name in ("1f1b", "zbh1"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            answer = self.document("check", name, "--ranks", "1024", "--microbatches", "4096")
            self.assertTrue(answer["certified"] and answer["streamed"])
            self.assertLess(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 60)
            self.assertGreater(answer["check_s"], 0)
            self.assertLess(answer["peak_memory_bytes"], 2 << 30)

    def test_what_a_file_lacks_at_its_end_is_missing_when_it_is_due(self):
        self.succeed("schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "-o", "orders.csv")
        facts = self.document("check", "orders.csv", "--microbatches", "5", status=CONTRACT)["counterexample"]
        self.assertEqual((facts["rule"], facts["missing"]), ("schedule.missing", "0F4"))
        self.refuse(ERROR, ["orders.csv: ranks: found 2, expected 3"], "check", "orders.csv", "--ranks", "3")

    def test_sizes_that_do_not_fit_are_refused_with_one_that_does(self):
        self.refuse(USAGE, ["9 microbatches", "10"], "schedule", "interleaved", "--ranks", "4", "--microbatches", "9")
        self.refuse(USAGE, ["microbatches", "4"], "check", "zbh1", "--ranks", "4", "--microbatches", "3")
        self.refuse(USAGE, ["9 microbatches", "10"], "check", "interleaved-zb", "--ranks", "4", "--microbatches", "9")
        self.refuse(USAGE, ["chunks", "interleaved"], "check", "1f1b", "--chunks", "2")
        self.refuse(USAGE, ["chunks", "exactly 2", "zbh1"], "check", "zbv", "--chunks", "1")

    def test_sizes_beyond_a_limit_are_usage_errors_as_those_that_do_not_fit(self):
        large = ("--ranks", "64", "--chunks", "64", "--microbatches", "65536")
        for command in ("schedule", "simulate", "check"):
            self.refuse(USAGE, ["at most 33554432"], command, "looped-bfs", *large)
            self.refuse(USAGE, ["at most 33554432"], command, "auto", *large)
            self.refuse(USAGE, ["a search takes"], command, "auto", "--ranks", "4096", "--microbatches", "1")
        self.refuse(USAGE, ["ranks times chunks"], "check", "gpipe", "--ranks", "4096", "--chunks", "64")

    def test_orders_for_several_chunks_take_two_where_nobody_says(self):
        for name, stages in (("zbh2", 4), ("looped-bfs", 8), ("interleaved-zb", 8), ("zbv", 8), ("v-half", 8),
                             ("v-min", 8), ("1f1b-v", 8), ("dualpipev", 8), ("dualpipe", 4)):
            self.assertEqual(self.document("check", name)["stages"], stages, name)

    def test_an_unknown_name_is_a_usage_error_that_lists_the_names(self):
        self.refuse(USAGE, ["1g1b", "1f1b", "zbh1"], "schedule", "1g1b")
        self.refuse(USAGE, ["1g1b", "1f1b", "zbh1"], "check", "1g1b")

    def test_a_slip_in_a_name_is_answered_with_the_nearest(self):
        for command in ("schedule", "check", "simulate"):
            for slip, meant in (("zbh3", "zbh1"), ("dualpip", "dualpipe"), ("atuo", "auto"), ("1F1B", "1f1b")):
                self.refuse(USAGE, [f"did you mean '{meant}'?"], command, slip)
            self.assertNotIn("did you mean", self.refuse(USAGE, ["neither"], command, "pizza").stderr)
        self.assertNotIn("did you mean", self.refuse(ERROR, ["no such file"], "check", "zbh3.csv").stderr.lower())

    def test_communication_is_written_for_names_and_files_and_read_back(self):
        sizes = ("--ranks", "2", "--chunks", "2", "--microbatches", "5")
        order = self.succeed("schedule", "dualpipev", *sizes, "-o", "order.csv").stdout
        moves = self.succeed("schedule", "dualpipev", *sizes, "--format", "compute_comms").stdout
        self.assertIn(",0SEND_F1,", moves)
        self.assertEqual(self.succeed("schedule", "order.csv", "--format", "compute_comms").stdout, moves)
        self.write("moves.csv", moves)
        self.assertEqual(self.succeed("schedule", "moves.csv").stdout, self.succeed("schedule", "order.csv").stdout)
        self.assertTrue(self.document("check", "moves.csv")["certified"])
        rows = self.document("schedule", "moves.csv")["orders"]
        self.assertIn("(0F3;3B1)OVERLAP_F_B", rows[0])
        self.assertEqual(",".join(rows[0]), self.succeed("schedule", "order.csv").stdout.splitlines()[0])
        self.refuse(USAGE, ["svgz", "compute_comms"], "schedule", "1f1b", "--format", "svgz")
        self.assertEqual(order, "")

    def test_malformed_files_exit_with_1_and_invalid_ones_with_3_and_name_their_place(self):
        for text, status, words in (
                ("0F0,0X0\n", ERROR, ["bad.csv:1:2", "row 1, cell 2", "0X0", "expected F, I, W or B"]),
                ("0F0,0B0 0B1\n", ERROR, ["bad.csv:1:2", "0B0 0B1", "nothing after"]),
                ("-1F0\n", ERROR, ["bad.csv:1:1", "-1F0", "from 0 on"]),
                ("0F99999999999\n", ERROR, ["bad.csv:1:1", "below 65536"]),
                ("0F0,(0B0)OVERLAP\n", ERROR, ["bad.csv:1:2", "(0B0)OVERLAP", "OVERLAP_F_B"]),
                ("0F0,0SEND_F0,0B0\n1F0,1B0\n", CONTRACT, ["bad.csv:2:1", "schedule.missing", "1F0", "RECV_F"])):
            with self.subTest(text=text):
                self.write("bad.csv", text)
                self.refuse(status, words, "check", "bad.csv")
                self.refuse(status, words, "schedule", "bad.csv", "--format", "compute_comms")
        for text, rule, words in (
                ("0F0,0B0\n1F0,0F0,1B0\n", "schedule.place", "row 2, cell 2"),
                ("0F0,0F0,0B0\n1F0,1B0\n", "schedule.duplicate", "row 1, cell 2"),
                ("0F0,0B0\n1F0\n", "schedule.missing", "1B0"),
                ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "schedule.cycle", "row 2, cell 3")):
            with self.subTest(text=text):
                self.write("bad.csv", text)
                done = self.run_program("check", "bad.csv")
                self.assertEqual(done.returncode, CONTRACT)
                self.assertIn(rule, done.stdout)
                self.assertIn(words, " ".join(done.stdout.split()))
                for form in ("compute_only", "compute_comms", "svg"):
                    self.refuse(CONTRACT, ["bad.csv", rule], "schedule", "bad.csv", "--format", form)
                self.refuse(CONTRACT, ["bad.csv", rule], "simulate", "bad.csv")

    def test_a_file_without_an_end_is_refused_and_a_sparse_one_takes_no_memory(self):
        self.write_tiny()
        for command in (("check", "/dev/zero"), ("simulate", "/dev/zero"), ("schedule", "/dev/zero"),
                        ("train", "tiny.yaml", "--set", "checkpoint.path=", "--set", "pipeline.schedule=/dev/zero")):
            self.refuse(ERROR, ["/dev/zero", "row 1, cell 1", "\\x00"], *command)
        self.need_start(limit_memory)
        self.write("sparse.csv", "".join(f"{stage}F65535,{stage}B65535\n" for stage in range(4096)))
        done = self.run_program("schedule", "sparse.csv", "--format", "svg", preexec_fn=limit_memory)
        self.assertEqual((done.returncode, done.stdout), (CONTRACT, ""))
        self.assertIn("schedule.missing", done.stderr)

    def test_a_refused_write_leaves_nothing_and_keeps_what_was_there(self):
        os.mkdir(self.path("folder"))
        self.refuse(ERROR, ["folder"], "schedule", "1f1b", "-o", "folder")
        self.refuse(ERROR, ["absent"], "schedule", "1f1b", "-o", "absent/orders.csv")
        self.refuse(ERROR, ["/dev/full"], "schedule", "1f1b", "-o", "/dev/full")
        self.write("orders.csv", "kept")
        self.refuse(USAGE, ["microbatches"], "schedule", "1f1b", "--microbatches", "0", "-o", "orders.csv")
        with open(self.path("orders.csv"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "kept")
        self.assertEqual(sorted(os.listdir(self.folder)), ["folder", "orders.csv"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
