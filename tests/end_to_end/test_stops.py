"""What ends a run early - Ctrl-C, a full disk, a limit on files - leaves whole files or none, and says which."""
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
import unittest

from support import ERROR, INTERRUPTED, PROGRAM, SECONDS_MAX, USAGE, Case, is_sanitized, sample_text

LONG = ("--set", "train.steps=1000000", "--set", "train.evaluate_every=0")


class Interrupted(Case):
    def interrupt(self, number, *arguments, delay_s=0.0):
        """Sends a signal after the first step is told; returns exit status, standard output, standard error."""
        if not os.path.exists(self.path("text.txt")):
            self.write_tiny()
        command = [PROGRAM, "train", "tiny.yaml", *LONG, *arguments]
        with subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as run:
            try:
                first = run.stderr.readline()
                while first and not first.startswith("step 1/"):
                    first = run.stderr.readline()
                time.sleep(delay_s)
                run.send_signal(number)
                out, err = run.communicate(timeout=SECONDS_MAX)
            finally:
                run.kill()
        return run.returncode, out, first + err

    def test_ctrl_c_stops_between_steps_and_keeps_weights_that_can_be_used(self):
        status, out, err = self.interrupt(signal.SIGINT, "--set", "checkpoint.path=model")
        self.assertEqual(status, INTERRUPTED, err)
        self.assertRegex(out, r"(?m)^interrupted after [1-9]\d* steps: loss ")
        self.assertRegex(out, r"(?m)^state_hash [0-9a-f]{32}$")
        self.assertIn("weights are in model", out)
        self.assertEqual(sorted(os.listdir(self.path("model"))), ["config.json", "model.safetensors"])
        self.assertEqual(len(self.document("generate", "model", "-n", "4")["tokens"]), 4)

    def test_json_says_that_and_where_it_was_interrupted(self):
        status, out, err = self.interrupt(signal.SIGTERM, "--set", "checkpoint.path=", "--json")
        self.assertEqual(status, INTERRUPTED, err)
        told = json.loads(out)
        self.assertTrue(told["interrupted"])
        self.assertEqual(len(told["loss_curve"]), told["steps"])
        self.assertNotIn("checkpoint", told)

    def test_without_a_path_it_says_that_nothing_was_kept(self):
        status, out, err = self.interrupt(signal.SIGINT, "--set", "checkpoint.path=")
        self.assertEqual(status, INTERRUPTED, err)
        self.assertIn("no weights were kept", out)
        self.assertEqual(sorted(os.listdir(self.folder)), ["text.txt", "tiny.yaml"])

    def test_ctrl_c_ends_a_long_validation_and_keeps_the_weights(self):
        self.write_tiny()
        self.write("text.txt", sample_text() * 500)
        status, out, err = self.interrupt(signal.SIGINT, "--set", "checkpoint.path=model", "--set", "train.steps=1",
                                          "--set", "data.validation=0.9", delay_s=0.3)  # it would take many seconds
        self.assertEqual(status, INTERRUPTED, err)
        self.assertNotIn("validation", err)
        self.assertRegex(out, r"(?m)^interrupted after 1 step: loss ")
        self.assertEqual(sorted(os.listdir(self.path("model"))), ["config.json", "model.safetensors"])


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (100 << 20, 100 << 20))


class LittleMemory(Case):
    @unittest.skipIf(is_sanitized(), "a sanitized program cannot run under a limit on address space")
    def test_a_limit_on_memory_below_what_openblas_takes_is_an_error_and_no_wait(self):
        self.need_start(limit_memory)
        self.write_tiny()
        done = self.run_program("train", "tiny.yaml", preexec_fn=limit_memory)
        self.assertEqual(done.returncode, ERROR)
        self.assertIn("ulimit -v", done.stderr)

    @unittest.skipIf(is_sanitized(), "a sanitized program cannot run under a limit on address space")
    def test_memory_that_is_refused_says_how_much_all_of_it_is_and_what_lowers_it(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

        self.need_start(limit)
        self.write_tiny()
        done = self.run_program("train", "tiny.yaml", "--set", "model.hidden=4096", "--set", "model.ffn=16384",
                                "--set", "pipeline.ranks=1", preexec_fn=limit)
        self.assertEqual(done.returncode, ERROR)
        self.assertRegex(done.stderr, r"refused \d+ bytes; a rank takes up to \d{10,} in all \(1 rank\)\n")
        self.assertIn("what to do: ", done.stderr)


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))


class FullDisk(Case):
    def files_below(self, folder):
        return sorted(name for _, _, names in os.walk(self.path(folder)) for name in names)

    def test_a_limit_on_files_is_an_error_that_leaves_no_part_of_one(self):
        self.write_tiny()
        self.refuse_writing("model", preexec_fn=limit_files)
        self.assertEqual(self.files_below("model"), [])

    def refuse_writing(self, model, **options):
        done = self.run_program("train", "tiny.yaml", "--set", f"checkpoint.path={model}", **options)
        self.assertEqual(done.returncode, ERROR, done.stderr)
        self.assertIn("model.safetensors", done.stderr)
        self.assertNotIn("weights are in", done.stdout)
        return done

    def test_a_checkpoint_that_cannot_be_written_costs_neither_the_weights_nor_the_figures(self):
        self.write_tiny()
        whole = self.document("train", "tiny.yaml", "--set", "checkpoint.path=whole")
        room = os.path.getsize(self.path("whole/model.safetensors")) * 3 // 2  # the optimizer's file is twice as large

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

        saving = ("train", "tiny.yaml", "--set", "checkpoint.path=model", "--set", "checkpoint.every=100")
        told = self.document(*saving, status=ERROR, preexec_fn=limit)
        self.assertEqual((told["state_hash"], told["loss"]), (whole["state_hash"], whole["loss"]))
        self.assertEqual((told["checkpoint"], told["checkpoints"]["written"]), ("model", 0))
        self.assertIn("optimizer.safetensors", told["error"]["path"])
        self.assertEqual(self.files_below("model"), ["config.json", "model.safetensors"])
        done = self.run_program(*saving, preexec_fn=limit)
        self.assertEqual(done.returncode, ERROR)
        self.assertIn("the checkpoint of step 3 could not be written", done.stderr)
        self.assertIn("weights are in model", done.stdout)
        self.assertIn(whole["state_hash"], done.stdout)
        self.assertNotIn("checkpoints are in", done.stdout)

    def test_weights_of_an_earlier_run_survive_a_later_one_that_cannot_write(self):
        self.write_tiny()
        self.succeed("train", "tiny.yaml", "--set", "checkpoint.path=model")
        with open(self.path("model/model.safetensors"), "rb") as file:
            before = file.read()
        self.refuse_writing("model", preexec_fn=limit_files)
        self.assertEqual(self.files_below("model"), ["config.json", "model.safetensors"])
        with open(self.path("model/model.safetensors"), "rb") as file:
            self.assertEqual(file.read(), before)

    def test_a_full_disk_is_an_error_that_leaves_no_part_of_a_file(self):
        self.write_tiny()
        os.mkdir(self.path("disk"))
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "qeffect-test", self.path("disk")],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if mounted.returncode != 0:
            self.skipTest("no small disk can be mounted here: " + mounted.stderr.decode().strip())
        try:
            done = self.refuse_writing("disk/model")
            self.assertIn("no space left", done.stderr.lower())
            self.assertEqual(self.files_below("disk"), [])
            done = self.run_program("train", "tiny.yaml", "--dump-initial", "disk/initial.safetensors")
            self.assertEqual(done.returncode, ERROR)
            self.assertEqual(self.files_below("disk"), [])
        finally:
            subprocess.run(["umount", self.path("disk")], check=True)

    def test_a_trap_whose_trace_cannot_be_written_is_still_a_trap(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        self.write_tiny()
        done = self.run_program("train", "tiny.yaml", "--inject", "slot.leak", preexec_fn=limit)
        self.assertEqual(done.returncode, 3)
        self.assertIn("slot.leak", done.stderr)
        self.assertIn("no trace was written", done.stderr)

    def test_places_that_cannot_be_written_to_are_refused_before_any_work_and_nothing_is_left(self):
        self.write_tiny()
        self.write("file", "")
        os.symlink("/absent/scratch", self.path("link"))
        before = sorted(os.listdir(self.folder))
        for place in ("file/trap.qet", "absent/trap.qet", "/proc/trap.qet", "/dev/full", ".", "x" * 300):
            self.refuse(ERROR, [place, "contracts.trace, where empty leaves none"], "train", "tiny.yaml", "--set",
                        f"contracts.trace={place}")
        for place in ("file", "file/model", "file/deep/model", "link", "link/", "link/deep/model", "/proc/model",
                      "/proc/deep/model", "x" * 300):
            self.refuse(ERROR, [place[:4], "checkpoint.path, where empty keeps nothing"], "train", "tiny.yaml", "--set",
                        f"checkpoint.path={place}")
        for option in ("--dump-initial", "--dump-batches"):
            self.refuse(ERROR, ["absent/file", f"the place is {option}"], "train", "tiny.yaml", option, "absent/file")
        self.refuse(USAGE, ["use dualpipev"], "train", "tiny.yaml", "--set", "pipeline.schedule=dualpipe", "--set",
                    "checkpoint.path=deep/model")  # whose places could be written to
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        self.succeed("train", "tiny.yaml", "--contracts", "off", "--set", "contracts.trace=absent/trap.qet", "--set",
                     "checkpoint.path=deep/model")
        self.assertEqual(sorted(os.listdir(self.folder)), sorted([*before, "deep"]))

    def test_a_folder_that_is_only_read_stops_no_run_that_asked_for_no_trace(self):
        self.write_tiny()
        done = self.run_program("train", self.path("tiny.yaml"), "--set", "checkpoint.path=", "--set",
                                f"data.path={self.path('text.txt')}", preexec_fn=lambda: os.chdir("/proc"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("a trap would leave no trace (contracts.trace)", done.stderr)
        done = self.run_program("train", self.path("tiny.yaml"), "--set", "checkpoint.path=", "--set",
                                f"data.path={self.path('text.txt')}")
        self.assertNotIn("would leave no trace", done.stderr)

    def test_places_that_cannot_be_are_refused_in_their_own_words(self):
        self.write_tiny()
        done = self.run_program("train", "tiny.yaml", "--set", "checkpoint.path=text.txt/model")
        self.assertEqual(done.returncode, ERROR)
        self.assertIn("text.txt", done.stderr)
        done = self.run_program("train", "tiny.yaml", "--dump-initial", "absent/initial.safetensors")
        self.assertEqual(done.returncode, ERROR)
        self.assertIn("absent", done.stderr)
        with tempfile.NamedTemporaryFile(dir=self.folder) as taken:
            self.assertEqual(self.run_program("train", "tiny.yaml", "--set", f"checkpoint.path={taken.name}")
                             .returncode, ERROR)


if __name__ == "__main__":
    unittest.main(verbosity=2)
