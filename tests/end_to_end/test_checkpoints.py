"""Checkpoints as a user meets them: a run that was stopped goes on with the same bits, other programs read the files,
what cannot keep the bits is refused by name, and what is damaged is named."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import unittest

from support import CONTRACT, DIFFERS, ERROR, GOOD, PROGRAM, SECONDS_MAX, USAGE, Case, sample_text

STEPS = 8
RECIPES = ("delayed", "current", "block", "bf16", "fp32")
KEEP_ALL = ("--set", f"train.steps={STEPS}", "--set", "checkpoint.keep=0", "--set", "contracts.trace=trap.qet")
# Ways to go on that keep the bits: mode, stages, ranks, schedule.
WAYS = (
    (),
    ("--mode", "captured", "--set", "train.capture=step"),
    ("--mode", "baseline"),
    ("--set", "pipeline.ranks=1", "--set", "pipeline.schedule=gpipe"),
    ("--set", "pipeline.schedule=zbh1", "--mode", "captured", "--set", "train.capture=layer"),
    ("--set", "pipeline.ranks=1", "--set", "pipeline.chunks=2", "--set", "pipeline.schedule=zbv"),
)


def header_of(path):
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return json.loads(file.read(length))


class Checkpoints(Case):
    def setUp(self):
        super().setUp()
        self.write_tiny()

    def trained(self, *arguments, path="run", status=GOOD):
        return self.document("train", "tiny.yaml", *KEEP_ALL, "--set", f"checkpoint.path={path}", *arguments,
                             status=status)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def saved_at(self, step, *arguments, path="run"):
        """A run whose first checkpoint is of this step: the first one is never postponed."""
        return self.trained("--set", f"checkpoint.every={step}", *arguments, path=path)

    def wait_for_first_step(self, process):
        text = ""
        while "step 1/" not in text:
            self.assertIsNone(process.poll())
            with open(self.path("err.txt"), encoding="utf-8") as file:
                text = file.read()

    def losses(self, document):
        return {entry["step"]: (entry["loss"], entry["gradient_norm"]) for entry in document["loss_curve"]}

    def assert_goes_on(self, whole, document, step):
        expected, found = self.losses(whole), self.losses(document)
        self.assertEqual(sorted(found), list(range(step + 1, STEPS + 1)))
        self.assertEqual(found, {at: expected[at] for at in found})
        self.assertEqual(document["state_hash"], whole["state_hash"])
        self.assertEqual(document["resumed_step"], step)

    def test_a_run_goes_on_from_any_step_in_any_way_with_the_same_bits(self):
        for number, recipe in enumerate(RECIPES):
            for step in range(1, STEPS):
                with self.subTest(recipe=recipe, step=step):
                    chosen = ("--set", f"recipe.name={recipe}")
                    whole = self.saved_at(step, *chosen)
                    way = WAYS[(number + step) % len(WAYS)]
                    document = self.document("train", "tiny.yaml", *KEEP_ALL, *chosen, "--resume",
                                             f"run/step-{step:08d}", "--set", "checkpoint.path=", *way)
                    self.assert_goes_on(whole, document, step)
                    shutil.rmtree(self.path("run"))

    def test_without_a_configuration_the_settings_are_the_checkpoint_s(self):
        whole = self.saved_at(3)
        document = self.document("train", "--resume", "run/step-00000003")
        self.assert_goes_on(whole, document, 3)
        self.assertEqual(document["checkpoint"], "run")
        again = self.document("train", "--resume", "run")
        self.assertEqual((again["resumed_step"], again["state_hash"]), (STEPS, whole["state_hash"]))

    def test_a_run_that_is_at_its_end_says_how_to_train_longer(self):
        self.saved_at(3)
        told = self.succeed("train", "--resume", "run/step-00000003").stdout
        longer = re.search(r"train (--resume run --set train\.steps=\d+ --new-lineage)` trains longer", told)
        self.assertIsNotNone(longer, told)
        document = self.document("train", *longer[1].split())
        self.assertEqual((document["resumed_step"], document["steps"]), (STEPS, 2 * STEPS))

    def test_the_run_is_the_same_over_many_restarts(self):
        whole = self.trained()
        self.trained("--set", "checkpoint.every=2", path="chain")
        shutil.rmtree(self.path("chain"))
        self.saved_at(2, path="chain")
        for step in (2, 4, 6):
            document = self.document("train", "--resume", f"chain/step-{step:08d}")
            self.assert_goes_on(whole, document, step)
            later = self.document("inspect", "chain")["checkpoints"]
            self.assertEqual(len({entry["run"] for entry in later}), 1, "one run all along")
            if step < 6:  # the next one is saved two steps later: the first of a process is sure
                self.assertIn(f"step-{step + 2:08d}", {entry["name"] for entry in later})

    def test_an_interrupted_run_is_saved_and_goes_on(self):
        with open(os.devnull, "wb") as nothing, open(self.path("err.txt"), "wb") as err:
            process = subprocess.Popen([PROGRAM, "train", "tiny.yaml", "--set", "train.steps=100000", "--set",
                                        "checkpoint.every=50000", "--set", "checkpoint.path=long"], cwd=self.folder,
                                       stdout=nothing, stderr=err)
            self.wait_for_first_step(process)
            process.terminate()
            self.assertEqual(process.wait(timeout=SECONDS_MAX), 130)
        found = self.document("inspect", "long")["checkpoints"]
        self.assertEqual(len(found), 1)
        self.assertGreater(found[0]["step"], 0)
        document = self.document("train", "--resume", "long", "--set", "train.evaluate_every=0", "--set",
                                 "data.validation=0.05", "--set", f"train.steps={found[0]['step'] + 2}",
                                 "--new-lineage")
        self.assertEqual(document["steps"], found[0]["step"] + 2)

    def test_what_cannot_keep_the_bits_is_refused_by_name_or_recorded(self):
        self.saved_at(3)
        changes = {
            "recipe.name: delayed -> current": ("--set", "recipe.name=current"),
            "recipe.history: 4 -> 9": ("--set", "recipe.history=9"),
            "train.learning_rate: 0.003 -> 0.001": ("--set", "train.learning_rate=1e-3"),
            "pipeline.microbatches: 4 -> 2": ("--set", "pipeline.microbatches=2"),
            "train.seed: 1 -> 2": ("--set", "train.seed=2"),
            "accumulation_order: ascending -> ": ("--set", "pipeline.schedule=looped-bfs", "--set",
                                                  "pipeline.ranks=1", "--set", "pipeline.chunks=2"),
        }
        for text, change in changes.items():
            with self.subTest(text):
                self.refuse(ERROR, [text, "--new-lineage"], "train", "tiny.yaml", *KEEP_ALL, "--resume",
                            "run/step-00000003", *change)
                self.document("train", "tiny.yaml", *KEEP_ALL, "--resume", "run/step-00000003", *change,
                              "--new-lineage", "--set", "checkpoint.every=100", "--set", "checkpoint.path=other")
                lineage = self.document("inspect", f"other/step-{STEPS:08d}")["lineage"]
                self.assertEqual([entry["from_step"] for entry in lineage], [0, 3])
                self.assertIn(text, lineage[1]["changes"])
                self.assertNotEqual(lineage[0]["run"], lineage[1]["run"])
                shutil.rmtree(self.path("other"))

    def test_a_checkpoint_keeps_its_model_whatever_else_is_accepted(self):
        self.saved_at(3)
        changes = ("--set", "model.layers=3", "--set", "model.hidden=64", "--set", "train.seed=2")
        for accepts in ((), ("--new-lineage",)):
            done = self.refuse(ERROR, ["another model: model.layers: 2 -> 3; model.hidden: 32 -> 64", "set it back"],
                               "train", "tiny.yaml", *KEEP_ALL, "--resume", "run/step-00000003", *changes, *accepts)
            self.assertNotIn("seed", done.stderr)
            self.assertNotIn("--new-lineage", done.stderr)

    def test_a_lineage_records_all_that_was_changed_and_a_refusal_counts_what_it_leaves_out(self):
        self.saved_at(3)
        changes = {"train.seed": "2", "train.learning_rate": "0.001234567", "train.warmup": "2", "train.steps": "9",
                   "train.minimum_learning_rate": "0.000123456", "train.beta1": "0.812345", "train.beta2": "0.991234",
                   "train.epsilon": "1.2345e-07", "train.weight_decay": "0.212345", "train.gradient_clip": "2",
                   "train.sequences": "2", "recipe.history": "9", "recipe.margin": "2", "recipe.amax": "most_recent",
                   "recipe.forward": "split", "recipe.input_grad": "fast", "recipe.weight_grad": "fast",
                   "pipeline.microbatches": "2", "data.validation": "0.212345", "model.rope_theta": "12345",
                   "model.norm_epsilon": "1.2345e-06", "model.sequence": "8"}
        given = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        done = self.refuse(ERROR, ["the same bits: model.sequence: 16 -> 8"], "train", "--resume", "run/step-00000003",
                           *given)
        told = [key for key in changes if f"{key}: " in done.stderr]
        self.assertLess(len(told), len(changes))
        self.assertIn(f"; and {len(changes) - len(told)} more\n", done.stderr)
        self.succeed("train", "--resume", "run/step-00000003", *given, "--new-lineage", "--set", "checkpoint.every=100",
                     "--set", "checkpoint.path=other")
        recorded = self.document("inspect", "other/step-00000009")["lineage"][1]["changes"]
        self.assertEqual({change.split(":")[0] for change in recorded.split("; ")}, set(changes))

    def test_a_directory_s_list_says_what_a_resume_from_it_does(self):
        whole = self.saved_at(3)
        os.rename(self.path("run", f"step-{STEPS:08d}"), self.path("moved"))
        os.symlink("../moved", self.path("run", f"step-{STEPS:08d}"))
        shutil.copytree(self.path("moved"), self.path("run", "step-00000077"))
        self.write("run/step-00000078", "no directory")
        listed = {entry["name"]: entry for entry in self.document("inspect", "run", status=ERROR)["checkpoints"]}
        self.assertEqual({name for name, entry in listed.items() if entry["verified"]}, {"step-00000003"})
        document = self.document("train", "--resume", "run", "--set", "checkpoint.keep=0")
        self.assert_goes_on(whole, document, 3)
        for name, words in (("step-00000077", "its manifest is of step 8"), (f"step-{STEPS:08d}", "it is a link"),
                            ("step-00000078", "it is a file, expected a directory")):
            self.assertIn(words, listed[name]["message"])

    def test_another_processor_s_products_are_refused(self):
        whole = self.saved_at(3)
        core = whole["backend"].split()[-1]
        other = "Haswell" if core != "Haswell" else "Sandybridge"
        done = self.run_program("train", "--resume", "run/step-00000003", environment={"OPENBLAS_CORETYPE": other})
        self.assertEqual(done.returncode, ERROR, done.stderr)
        self.assertIn(f"algorithm.blas_core: {core} -> {other}", done.stderr)

    def test_every_window_is_used_once_over_restarts(self):
        """Positions in the data go on, with another batch size too: batches of steps are those of one stream."""
        self.saved_at(3)
        found = self.document("inspect", "run/step-00000003")
        self.assertEqual(found["data"]["position"], 3 * 4)
        self.document("train", "tiny.yaml", *KEEP_ALL, "--resume", "run/step-00000003", "--set",
                      "pipeline.microbatches=2", "--new-lineage", "--set", "checkpoint.every=100", "--set",
                      "checkpoint.path=other", "--dump-batches", "resumed.safetensors", "--dump-steps", "2")
        self.assertEqual(self.document("inspect", f"other/step-{STEPS:08d}")["data"]["position"],
                         3 * 4 + (STEPS - 3) * 2)
        self.trained("--dump-batches", "whole.safetensors", "--dump-steps", "4", path="")
        # Step 4 of the whole run has windows 12 to 15; steps 4 and 5 of the other have 12, 13 and 14, 15.
        whole, resumed = (self.batches(name) for name in ("whole.safetensors", "resumed.safetensors"))
        self.assertEqual(whole[3 * 4 * 16 * 4:], resumed)

    def batches(self, name):
        path = self.path(name)
        header = header_of(path)
        begin, end = header["tokens"]["data_offsets"]
        with open(path, "rb") as file:
            data = file.read()
        offset = 8 + struct.unpack("<Q", data[:8])[0]
        return data[offset + begin:offset + end]

    def test_inspect_names_the_first_tensor_that_differs_and_by_how_much(self):
        self.saved_at(3)
        self.saved_at(3, "--set", "train.evaluate_every=2", path="same")
        self.assertIn("equal", self.succeed("inspect", "--diff", "run/step-00000003", "same/step-00000003").stdout)
        path = self.path("same", "step-00000003", "optimizer.safetensors")
        name = "model.layers.1.mlp.down_proj.weight.moment1"
        begin = header_of(path)[name]["data_offsets"][0]
        with open(path, "r+b") as file:
            offset = 8 + struct.unpack("<Q", file.read(8))[0] + begin + 4 * 5
            file.seek(offset)
            value = struct.unpack("<f", file.read(4))[0]
            file.seek(offset)
            file.write(struct.pack("<f", value + 0.25))
        damaged = self.refuse(ERROR, ["optimizer.safetensors", "XXH3-128"], "inspect", "same/step-00000003")
        self.assertNotIn("state_hash", damaged.stdout)
        self.saved_at(3, "--set", "train.seed=2", path="other")
        found = self.document("inspect", "--diff", "run/step-00000003", "other/step-00000003", status=DIFFERS)
        self.assertEqual(found["first"]["name"], "lm_head.weight")
        self.assertEqual(found["changes"], {"train.seed": "1 -> 2"})
        self.assertGreater(found["first"]["largest"], 0)
        self.refuse(USAGE, ["two checkpoints"], "inspect", "--diff", "run")
        self.refuse(USAGE, ["--diff"], "inspect", "run", "other")

    def test_what_is_no_checkpoint_is_said_so(self):
        self.trained()
        for path, words in (("run", ["no checkpoint"]), ("nowhere", ["no such file", "checkpoint.path"]),
                            ("tiny.yaml", ["tiny.yaml: it is a file", "checkpoint.path"]), ("", ["the path is empty"])):
            self.refuse(ERROR, words, "train", "--resume", path)
            self.refuse(ERROR, words, "inspect", path)
        self.refuse(USAGE, ["--new-lineage"], "train", "tiny.yaml", "--new-lineage")
        self.refuse(USAGE, ["checkpoint.path is empty"], "train", "tiny.yaml", "--set", "checkpoint.every=2", "--set",
                    "checkpoint.path=")

    def test_mixed_files_are_trapped_when_named_and_passed_over_when_searched(self):
        self.saved_at(3)
        source = self.path("run", f"step-{STEPS:08d}", "scales.safetensors")
        shutil.copy(source, self.path("run", "step-00000003", "scales.safetensors"))
        answer = self.document("train", "--resume", "run/step-00000003", status=CONTRACT)
        self.assertEqual(answer["breach"]["violations"][0]["rule"], "checkpoint.mixed")
        answer = self.document("inspect", "run/step-00000003", status=CONTRACT)
        self.assertEqual(answer["breach"]["violations"][0]["rule"], "checkpoint.mixed")
        self.saved_at(5, path="five")
        shutil.copytree(self.path("five", "step-00000005"), self.path("run", "step-00000005"))
        manifest = self.path("run", "step-00000005", "manifest.json")
        shutil.copy(self.path("run", f"step-{STEPS:08d}", "manifest.json"), manifest)
        answer = self.document("train", "--resume", "run/step-00000005", status=CONTRACT)
        self.assertEqual(answer["breach"]["violations"][0]["rule"], "checkpoint.run")

    def test_the_first_use_after_a_restart_is_trapped_before_its_fill(self):
        self.saved_at(3)
        answer = self.document("train", "--resume", "run/step-00000003", "--inject", "cache.empty@4",
                               "--set", "contracts.trace=trap.qet", status=CONTRACT)
        self.assertEqual(answer["breach"]["violations"][0]["rule"], "cache.empty")
        self.assertEqual(answer["steps"], 3)
        saved = self.document("inspect", "run/step-00000003")
        self.assertEqual(answer["state_hash"], saved["state_hash"])
        self.assertEqual(self.document("trace", "check", "trap.qet", status=CONTRACT)["verdict"], "cache.empty")
        self.refuse(USAGE, ["never comes"], "train", "--resume", "run/step-00000003", "--inject", "cache.empty@3")

    def test_a_trap_leaves_a_checkpoint_of_the_last_good_step(self):
        whole = self.trained()
        self.document("train", "tiny.yaml", *KEEP_ALL, "--set", "checkpoint.path=trapped", "--set",
                      "checkpoint.every=100", "--inject", "scale.twice@6", status=CONTRACT)
        document = self.document("train", "--resume", "trapped")
        self.assert_goes_on(whole, document, 5)

    def test_a_hostile_checkpoint_writes_nowhere_else(self):
        """Its paths for output are not followed: a run goes on in the directory that was named."""
        os.mkdir(self.path("elsewhere"))
        self.saved_at(3, "--set", "contracts.trace=elsewhere/trap.qet")
        os.rmdir(self.path("elsewhere"))
        os.rename(self.path("run"), self.path("moved"))
        self.document("train", "--resume", "moved/step-00000003")
        self.assertFalse(os.path.exists(self.path("run")))
        self.assertTrue(os.path.exists(self.path("moved", f"step-{STEPS:08d}", "manifest.json")))

    def test_a_hostile_directory_makes_nobody_write_through_its_links(self):
        self.saved_at(3, "--set", "train.timeline=elsewhere.json")
        for name in ("model.safetensors", "config.json"):
            with self.subTest(name=name):
                self.write("mine", "precious")
                os.remove(self.path("run", name))
                os.symlink("../mine", self.path("run", name))
                self.refuse(ERROR, [name, "a link"], "train", "--resume", "run/step-00000003")
                with open(self.path("mine"), encoding="utf-8") as file:
                    self.assertEqual(file.read(), "precious")
                os.remove(self.path("run", name))
        os.mkdir(self.path("run", "model.safetensors"))
        done = self.refuse(ERROR, ["model.safetensors", "a directory"], "train", "--resume", "run/step-00000003")
        self.assertNotIn("step 4", done.stderr)  # before hours of training
        os.rmdir(self.path("run", "model.safetensors"))
        self.succeed("train", "--resume", "run/step-00000003")
        last = self.document("inspect", f"run/step-{STEPS:08d}")
        self.assertEqual(last["settings"]["train.timeline"].strip('"'), "")

    def test_weights_are_not_written_into_a_checkpoint(self):
        self.saved_at(3)
        before = self.succeed("inspect", "run/step-00000003").stdout
        for more in ((), ("--resume", "run/step-00000003"), ("--set", "checkpoint.every=2")):
            self.refuse(ERROR, ["run/step-00000003", "would destroy the checkpoint"], "train", "tiny.yaml", *KEEP_ALL,
                        "--set", "checkpoint.path=run/step-00000003", *more)
        self.assertEqual(self.succeed("inspect", "run/step-00000003").stdout, before)

    def test_a_checkpoint_goes_with_what_others_put_into_it(self):
        """Uploads and notebooks leave caches in directories; a link in one is not followed."""
        self.saved_at(3)
        deep = self.path("run", "step-00000003", *(f"level{i}" for i in range(5)))
        os.makedirs(deep)
        self.write("mine", "precious")
        os.makedirs(self.path("others"))
        self.write("others/mine", "precious")
        os.symlink(self.path("mine"), os.path.join(deep, "file"))
        os.symlink(self.path("others"), os.path.join(deep, "directory"))
        self.document("train", "--resume", "run/step-00000003", "--set", "checkpoint.every=1", "--set",
                      "checkpoint.keep=1")
        self.assertEqual([name for name in os.listdir(self.path("run")) if not name.startswith(("model", "config"))],
                         [f"step-{STEPS:08d}"])
        for name in ("mine", "others/mine"):
            with open(self.path(name), encoding="utf-8") as file:
                self.assertEqual(file.read(), "precious")

    def test_a_name_that_is_too_long_is_said_so(self):
        done = self.refuse(ERROR, ["cannot make the directory", "too long"], "train", "tiny.yaml", "--set",
                           "checkpoint.path=" + "n" * 256)
        self.assertNotIn("in the way", done.stderr)

    def test_a_terminal_is_not_told_what_a_file_says(self):
        """Escape sequences in what anybody may have written are printed, not sent."""
        self.write("te\x1b[31mxt\u009b.txt", sample_text())
        self.saved_at(3, "--set", "data.path=te\x1b[31mxt\u009b.txt")
        listed = self.succeed("inspect", "run/step-00000003")
        self.assertIn("data        te\\x1B[31mxt\\x9B.txt:", listed.stdout)
        done = self.refuse(ERROR, ["no\\x1b[2j"], "inspect", "no\x1b[2J")
        for text in (listed.stdout, done.stderr):
            self.assertNotRegex(text, "[\x00-\x08\x0b-\x1f\x7f-\x9f]")

    def test_two_runs_into_one_directory_are_kept_apart(self):
        with open(self.path("err.txt"), "wb") as err:
            process = subprocess.Popen([PROGRAM, "train", "tiny.yaml", "--set", "train.steps=1000000", "--set",
                                        "checkpoint.every=1000000", "--set", "checkpoint.path=shared"],
                                       cwd=self.folder, stdout=subprocess.DEVNULL, stderr=err)
            self.wait_for_first_step(process)
            self.refuse(ERROR, ["another run"], "train", "tiny.yaml", "--set", "checkpoint.every=1", "--set",
                        "checkpoint.path=shared", "--set", "train.steps=2")
            process.kill()
            process.wait()
        self.succeed("train", "tiny.yaml", "--set", "checkpoint.every=1", "--set", "checkpoint.path=shared", "--set",
                     "train.steps=2")

    def test_who_forgot_to_resume_is_told_what_is_replaced(self):
        def told(*arguments):
            return "run holds checkpoints of another run" in self.succeed("train", *arguments).stderr
        begin = ("tiny.yaml", "--set", "checkpoint.every=2", "--set", "checkpoint.path=run")
        self.assertFalse(told(*begin))
        self.assertFalse(told("--resume", "run"))
        self.assertFalse(told(*begin, "--set", "checkpoint.keep=0"))
        self.assertTrue(told("--resume", "run/step-00000003/model.safetensors", "--new-lineage", *begin))
        done = self.succeed("train", *begin)
        self.assertIn("--resume run/step-00000003 goes on from them", done.stderr)

    def test_the_checking_device_goes_on_as_the_plain_one(self):
        whole = self.saved_at(6)
        document = self.document("train", "--resume", "run/step-00000006", "--device", "check")
        self.assert_goes_on(whole, document, 6)


PEERS = """
import glob, json, sys
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

folder, batches = sys.argv[1:]
count = 0
for path in sorted(glob.glob(folder + "/*.safetensors")):
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["qeffect.step"] == "3", file.metadata()
        for name in file.keys():
            tensor = file.get_tensor(name)
            assert tensor.dtype in (torch.float32, torch.int64), name
            count += 1
model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
with safe_open(batches, framework="pt") as file:
    tokens, targets = (file.get_tensor(name)[0].long() for name in ("tokens", "targets"))
with torch.no_grad():
    logits = model(tokens).logits
loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
with torch.no_grad():
    last = model(torch.tensor([list(b"In the beginning")])).logits[0, -1]
print(json.dumps({"tensors": count, "loss": loss.item(), "logits": last.tolist()}))
"""


MAKE_STATE = """
import sys
import torch
from safetensors.torch import load_file, save_file

weights, scales, out = sys.argv[1:]
tensors = {name: value.clone() for name, value in load_file(weights).items()}
kept = load_file(scales)
modules = sorted({name.rsplit(".", 2)[0] for name in kept})
for module in modules:
    column = {role: kept[f"{module}.{role}.history"] for role in ("x", "w", "dy")}
    scale = {role: kept[f"{module}.{role}.scale"] for role in ("x", "w", "dy")}
    nothing, one = torch.zeros_like(column["x"]), torch.ones(1)
    tensors[f"{module}.scale_fwd"] = torch.cat([scale["x"], scale["w"], one])
    tensors[f"{module}.amax_history_fwd"] = torch.stack([column["x"], column["w"], nothing], dim=1).contiguous()
    tensors[f"{module}.scale_bwd"] = torch.cat([scale["dy"], one])
    tensors[f"{module}.amax_history_bwd"] = torch.stack([column["dy"], nothing], dim=1).contiguous()
save_file(tensors, out)
print(len(modules))
"""


def python_with_transformers():
    for python in (sys.executable, os.environ.get("QE_PEER_PYTHON", "")):
        if python and subprocess.run([python, "-c", "import torch, transformers, safetensors"], check=False,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return python
    return None


class Peers(Case):
    def path(self, *names):
        return os.path.join(self.folder, *names)

    def test_transformers_computes_the_loss_that_the_next_step_prints_and_the_logits_of_generate(self):
        python = python_with_transformers()
        if python is None:
            print("skipped: no Python with torch, transformers and safetensors (name one in QE_PEER_PYTHON)")
            self.skipTest("no transformers")
        self.write_tiny()
        self.write("peers.py", PEERS)
        settings = ("--set", "recipe.name=fp32", "--set", "train.steps=4", "--set", "checkpoint.keep=0")
        self.document("train", "tiny.yaml", *settings, "--set", "checkpoint.every=3", "--set", "checkpoint.path=run")
        # The loss of step 4 is that of the weights of step 3 on the batch of step 4.
        resumed = self.document("train", "tiny.yaml", *settings, "--resume", "run/step-00000003", "--set",
                                "checkpoint.path=", "--dump-batches", "batch.safetensors", "--dump-steps", "1")
        done = subprocess.run([python, self.path("peers.py"), self.path("run", "step-00000003"),
                               self.path("batch.safetensors")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=SECONDS_MAX, check=False)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        found = json.loads(done.stdout.decode().strip().split("\n")[-1])
        self.assertEqual(found["tensors"], len(self.document("inspect", "run/step-00000003")["tensors"]))
        self.assertAlmostEqual(found["loss"], resumed["loss_curve"][0]["loss"], delta=2e-6)
        ours = self.document("generate", "run/step-00000003", "--prompt", "In the beginning", "--tokens", "1")
        self.assertEqual(len(ours["last_logits"]), len(found["logits"]))
        for mine, theirs in zip(ours["last_logits"], found["logits"]):
            self.assertAlmostEqual(mine, theirs, delta=1e-5)

    def test_scales_that_torch_wrote_as_transformer_engine_lays_them_out_are_taken_over(self):
        python = python_with_transformers()
        if python is None:
            print("skipped: no Python with torch, transformers and safetensors (name one in QE_PEER_PYTHON)")
            self.skipTest("no torch")
        self.write_tiny()
        self.write("state.py", MAKE_STATE)
        settings = ("--set", "checkpoint.keep=0", "--set", "checkpoint.every=3", "--set", "train.steps=4")
        self.document("train", "tiny.yaml", *settings, "--set", "checkpoint.path=run")
        done = subprocess.run([python, self.path("state.py"), self.path("run", "step-00000003", "model.safetensors"),
                               self.path("run", "step-00000003", "scales.safetensors"), self.path("te.safetensors")],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=SECONDS_MAX, check=False)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        self.refuse(ERROR, ["--new-lineage"], "train", "tiny.yaml", "--resume", "te.safetensors")
        begun = self.document("train", "tiny.yaml", *settings, "--resume", "te.safetensors", "--new-lineage",
                              "--set", "checkpoint.path=te")
        changes = self.document("inspect", "te/step-00000004")["lineage"][0]["changes"]
        scales = 3 * int(done.stdout)
        self.assertIn(f"{scales} of {scales} scales from Transformer Engine's state", changes)
        # On another text both start at its first window, so that equal losses say that weights and scales are equal.
        self.write("other.txt", sample_text(5000)[::-1])
        fresh = ("train", "tiny.yaml", *settings, "--new-lineage", "--set", "data.path=other.txt", "--set",
                 "checkpoint.path=", "--set", "checkpoint.every=0", "--resume")
        whole, taken, plain = (self.document(*fresh, path)["loss_curve"][0] for path in
                               ("run/step-00000003", "te.safetensors", "run/step-00000003/model.safetensors"))
        self.assertEqual((taken["loss"], taken["gradient_norm"]), (whole["loss"], whole["gradient_norm"]))
        self.assertNotEqual(plain["loss"], whole["loss"], "the scales matter")
        self.assertEqual(begun["resumed_step"], 0)


if __name__ == "__main__":
    unittest.main()
