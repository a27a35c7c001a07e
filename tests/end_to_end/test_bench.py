"""`qeffect bench`: figures of one run, every one there, finite, and consistent with the others."""
import math
import os
import resource
import unittest

from support import ERROR, TINY, USAGE, Case, is_sanitized

SHORT = ("--steps", "1", "--pairs", "2")


class Bench(Case):
    def test_contracts_are_held_against_none(self):
        self.write_tiny()
        for contracts in ("observe", "off"):
            told = self.document("bench", "tiny.yaml", *SHORT, "--contracts", contracts)
            self.assertIn(f"{contracts}_over_off", told["step_time_ratios"])
            self.assertNotIn("trap_over_off", told["step_time_ratios"])
            self.assertEqual({row["contracts"] for row in told["step_times"]}, {contracts, "off"})

    def test_a_layer_without_a_shape_is_one_that_the_host_can_do(self):
        (layer,) = self.document("bench", "layer", "--seconds", "1")["layers"]
        self.assertEqual((layer["shape"], layer["tokens"]), ("tiny", 64))
        self.assertLessEqual(layer["launch_low_us"], layer["launch_us"])
        self.assertLessEqual(layer["launch_us"], layer["launch_high_us"])

    @unittest.skipIf(is_sanitized(), "a sanitized program cannot run under a limit on address space")
    def test_a_layer_that_does_not_fit_says_what_of_this_command_makes_it_smaller(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

        self.need_start(limit)
        done = self.run_program("bench", "layer", "h4096", "--sets", "16", preexec_fn=limit)
        self.assertEqual((done.returncode, done.stdout), (ERROR, ""))
        self.assertRegex(done.stderr, r"refused \d+ bytes")
        self.assertIn("--sets 1", done.stderr)

    @unittest.skipIf(is_sanitized(), "a sanitized program cannot run under a limit on address space")
    def test_a_layer_that_is_refused_something_else_keeps_its_way_out(self):
        told = set()
        for mib in range(60, 1000, 40):  # what libraries take differs from build to build
            def limit():
                resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))

            done = self.run_program("bench", "layer", "tiny", "--seconds", "1", preexec_fn=limit,
                                    environment={"OPENBLAS_NUM_THREADS": "1"})
            told.add(done.stderr)
            if done.returncode == 0:
                break
        self.assertTrue(any("OpenBLAS needs" in text and "ulimit -v" in text for text in told), told)

    def test_a_shape_that_there_is_not_is_refused_before_the_first_is_timed(self):
        for command in ("layer", "tiny"), ("placement", "reference"):
            refused = self.run_program("bench", *command, "h12")
            self.assertEqual((refused.returncode, refused.stdout), (2, ""))
            self.assertIn("there is no shape 'h12'", refused.stderr)

    def test_steps_and_placements_say_which_settings_the_host_has_no_use_for(self):
        for command in ("step", "--way", "eager", "--steps", "1"), ("placement", "--pairs", "1", "--steps", "1"):
            told = self.succeed("bench", *command, "--set", "train.algorithms=chosen")
            self.assertEqual(told.stderr.count("train.algorithms is for a GPU"), 1, told.stderr)

    def test_one_run_tells_steps_ratios_contracts_kernels_and_memory(self):
        self.write_tiny()
        told = self.document("bench", "tiny.yaml", *SHORT)
        times = {(row["recipe"], row["mode"], row["contracts"]): row for row in told["step_times"]}
        self.assertEqual(sorted(times), sorted(
            [(recipe, "eager", "trap") for recipe in ("delayed", "current", "block", "bf16", "fp32")]
            + [("delayed", mode, "trap") for mode in ("baseline", "captured")] + [("delayed", "eager", "off")]))
        for row in told["step_times"]:
            self.assertAlmostEqual(row["step_ms"] * row["tokens_per_s"], 1e3 * 4 * 16, delta=1e-3)
        self.assertEqual(sorted(told["step_time_ratios"]), [
            "baseline_over_eager", "bf16_over_fp32", "block_over_bf16", "captured_over_eager", "current_over_bf16",
            "delayed_over_bf16", "delayed_over_fp32", "trap_over_off"])
        for ratio in told["step_time_ratios"].values():
            self.assertTrue(all(math.isfinite(figure) and figure > 0 for figure in ratio.values()))
            self.assertLessEqual(ratio["quartile_low"], ratio["median"])
            self.assertLessEqual(ratio["median"], ratio["quartile_high"])
        contracts = told["contracts"]
        self.assertGreater(contracts["items_per_step"], contracts["ops_per_step"])
        self.assertGreater(contracts["ops_per_step"], 100)
        self.assertGreater(contracts["check_ns"], 0)
        self.assertGreater(contracts["judge_ns"], contracts["check_ns"])
        self.assertAlmostEqual(contracts["step_check_us"],
                               contracts["items_per_step"] * contracts["check_cold_ns"] / 1e3, places=6)
        self.assertAlmostEqual(contracts["check_share"], contracts["step_check_us"] / 1e3
                               / times["delayed", "eager", "trap"]["step_ms"], places=9)
        graphs = told["graphs"]
        self.assertTrue(all(figure > 0 for figure in graphs.values()))
        self.assertAlmostEqual(graphs["replay_ns"], graphs["launch_ns"] + graphs["seal_ns"], places=6)
        self.assertTrue(all(row["gelements_per_s"] > 0 for row in told["kernels"]["quantize"]))
        self.assertEqual([row["name"] for row in told["kernels"]["matrix_products"]],
                         ["qkv", "attention out", "gate and up", "down", "head"])
        self.assertEqual([row["stage"] for row in told["stage_times"]], [0, 1])
        for row in told["stage_times"]:
            self.assertTrue(all(0 < row[part] < math.inf for part in ("forward_ms", "input_ms", "weight_ms")))
        for rank in told["memory"]:
            self.assertEqual(rank["slot_bytes"], rank["doubled_microbatches_slot_bytes"])
        self.assertEqual(sorted(os.listdir(self.folder)), ["text.txt", "tiny.yaml"], "nothing is kept")

    def test_gpipe_keeps_more_for_twice_the_microbatches_and_bench_shows_it(self):
        self.write_tiny()
        told = self.document("bench", "tiny.yaml", *SHORT, "--set", "pipeline.schedule=gpipe", "--set",
                             "recipe.name=bf16")
        self.assertGreater(told["memory"][0]["doubled_microbatches_slot_bytes"], 1.7 * told["memory"][0]["slot_bytes"])
        self.assertEqual(told["pipeline"]["recipe"], "bf16")

    def test_people_get_a_table_that_fits_a_terminal(self):
        self.write_tiny(TINY.replace("schedule: 1f1b", "schedule: zbh1"))
        text = self.succeed("bench", "tiny.yaml", *SHORT).stdout
        for word in ("delayed / bf16", "baseline / eager", "share of a step", "G elem/s", "GF/s", "slots"):
            self.assertIn(word, text)
        self.assertLessEqual(max(map(len, text.split("\n"))), 120)

    def test_a_schedule_from_a_file_has_no_twice_the_microbatches(self):
        self.write_tiny()
        self.succeed("schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "-o", "x.csv")
        told = self.document("bench", "tiny.yaml", *SHORT, "--set", "pipeline.schedule=x.csv")
        self.assertEqual([rank["doubled_microbatches_slot_bytes"] for rank in told["memory"]], [None, None])

    def test_slips_are_refused(self):
        self.write_tiny()
        for value in ("0", "x", "-1", "1000000000000"):
            self.refuse(USAGE, ["--steps"], "bench", "tiny.yaml", f"--steps={value}")
            self.refuse(USAGE, ["--pairs"], "bench", "tiny.yaml", f"--pairs={value}")
        self.refuse(ERROR, ["absent.yaml"], "bench", "absent.yaml")
        os.remove(self.path("text.txt"))
        self.refuse(ERROR, ["text.txt"], "bench", "tiny.yaml", *SHORT)


class Placement(Case):
    def row(self, *arguments):
        return self.document("bench", "placement", *arguments, "--steps", "1", "--pairs", "2")["rows"][0]

    def test_copies_are_counted_and_change_no_bit(self):
        row = self.row()
        self.assertEqual(row["direct_copies"], 0)
        self.assertEqual(row["copy_linear_copies"], 3 * 4 * 8)
        self.assertEqual(row["copy_copies"], (1 + 3 * 6 + 2) * 8)
        self.assertTrue(row["same_bits"])
        self.assertEqual(row["direct_state_hash"], row["copy_state_hash"])
        self.assertGreater(row["predicted_ms"], 0)
        self.assertEqual((row["copy_launches"], row["read_bytes"]), (21 * 15, 0))  # 8 out, 7 in; products as direct's

    def test_shapes_pipelines_and_recipes_are_options(self):
        for recipe in ("block", "bf16"):
            row = self.row("h64-t32", "--set", "pipeline.ranks=2", "--set", "pipeline.microbatches=4",
                           "--set", f"recipe.name={recipe}", "--set", "train.capture=step")
            self.assertEqual((row["layers"], row["hidden"], row["ffn"], row["microbatch_tokens"]), (4, 64, 256, 32))
            self.assertEqual(row["copy_copies"], (1 + 4 * 6 + 2) * 4)
            self.assertTrue(row["same_bits"])

    def test_a_shape_that_is_none_is_a_usage_error(self):
        for shape in ("h0-t32", "h64", "h64-t32x", "large", "h4294967360-t16", "h64-t4294967312", "h+64-t16",
                      "h 64-t16", "h064-t16", "h-64-t16", "h65537-t16", "h64-t65537", "h64t16", "h64-t", "h-t16",
                      "h64-t16-alon", "h64-t16-alone ", "-", "h"):
            self.refuse(USAGE, [f"there is no shape '{shape}'"], "bench", "placement", "--", shape)

    def test_a_width_of_no_whole_heads_is_one_head(self):
        told = self.document("bench", "placement", "h100-t16", "--pairs", "1", "--steps", "1")
        self.assertEqual(told["rows"][0]["hidden"], 100)


class Step(Case):
    def test_three_ways_of_one_step(self):
        told = self.document("bench", "step", "--steps", "2")
        ways = {row["way"]: row for row in told["steps"]}
        self.assertEqual(sorted(ways), ["action", "eager", "step"])
        self.assertEqual((ways["eager"]["graphs"], ways["step"]["graphs"]), (0, 2))
        self.assertEqual(told["tokens_per_step"], 8 * 32)
        for row in ways.values():
            self.assertLess(row["commit_ms"], row["step_ms"])
            self.assertIsNone(row["device_used_bytes"])
            taken = {**row["taken"], "total_bytes": row["taken"]["total_bytes"] - row["taken"]["graphs_bytes"],
                     "graphs_bytes": 0}
            self.assertEqual(row["foretold"], taken)
            self.assertLessEqual(row["fastest_ms"], row["step_ms"])
            self.assertEqual(row["peak_activation_bytes"], row["simulated_activation_bytes"])
            self.assertGreaterEqual(row["placed_activation_bytes"], row["peak_activation_bytes"])
            self.assertTrue(all(math.isfinite(figure) for figure in row.values() if isinstance(figure, float)))
        parameters = told["parameters"] - told["embedding_parameters"]
        attention = 6 * 3 * 256 * 32 * 64
        self.assertAlmostEqual(told["model_flops_per_step"], 6.0 * parameters * 256 + attention)

    def test_one_way_alone(self):
        told = self.document("bench", "step", "tiny", "--way", "action", "--steps", "1")
        self.assertEqual([row["way"] for row in told["steps"]], ["action"])
        self.refuse(USAGE, ["sideways"], "bench", "step", "--way", "sideways")
        self.refuse(USAGE, ["huge"], "bench", "step", "huge")


if __name__ == "__main__":
    unittest.main(verbosity=2)
