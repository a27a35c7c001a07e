"""What the end-to-end tests share: running the program as a user does, in a folder of its own."""
import json
import os
import random
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.environ.get("QEFFECT", os.path.join(ROOT, "build", "qeffect"))
SECONDS_MAX = 240  # nothing here works for long; a sanitized build on a busy machine needs a good part of this

GOOD, ERROR, USAGE, CONTRACT, DIFFERS, INTERRUPTED = 0, 1, 2, 3, 4, 130

# The smallest run that has two stages, two heads on one key-value head, and several windows of text.
TINY = """\
model:
  layers: 2
  hidden: 32
  heads: 2
  kv_heads: 1
  ffn: 64
  vocab: 256
  sequence: 16
data:
  path: text.txt
train:
  steps: 3
  sequences: 1
  warmup: 1
pipeline:
  schedule: 1f1b
  ranks: 2
  chunks: 1
  microbatches: 4
"""


def sample_text(characters=6000):
    """Words with some order in them, always the same."""
    source = random.Random(7)
    words = ["light", "and", "the", "water", "was", "upon", "earth", "day", "he", "said"]
    text = ""
    while len(text) < characters:
        text += source.choice(words) + source.choice([" ", " ", " ", ", ", ".\n"])
    return text


def is_sanitized():
    """A sanitizer's shadow memory takes terabytes of address space: no limit on it can be set."""
    with open(PROGRAM, "rb") as file:
        content = file.read()
    return b"__asan_init" in content or b"__tsan_init" in content


class Case(unittest.TestCase):
    """A folder per test; the program runs in it, so that relative paths and left-over files are the test's own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="qeffect-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return name

    def write_tiny(self, configuration=TINY):
        self.write("text.txt", sample_text())
        return self.write("tiny.yaml", configuration)

    def run_program(self, *arguments, environment=None, **options):
        """The finished process. Death by a signal or a time-out is a failure, whatever the test looks for."""
        options.setdefault("stdout", subprocess.PIPE)
        done = subprocess.run([PROGRAM, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=SECONDS_MAX, check=False,
                              env={**os.environ, **(environment or {})}, **options)
        done.stdout = (done.stdout or b"").decode("utf-8", "strict")
        done.stderr = done.stderr.decode("utf-8", "strict")
        self.assertGreaterEqual(done.returncode, 0, f"{arguments} died by a signal:\n{done.stderr}")
        self.assertNotIn("Sanitizer", done.stderr)
        return done

    def need_start(self, preexec_fn):
        """Skips where the loader itself finds no room: the libraries of a build with CUDA take most of a GiB."""
        if self.run_program("--version", preexec_fn=preexec_fn).returncode == 127:
            self.skipTest("this build's libraries take more address space than the limit")

    def succeed(self, *arguments, **options):
        done = self.run_program(*arguments, **options)
        self.assertEqual(done.returncode, GOOD, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def document(self, *arguments, status=GOOD, **options):
        """The one JSON document that --json promises."""
        done = self.run_program(*arguments, "--json", **options)
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return json.loads(done.stdout)

    def refuse(self, status, words, *arguments, **options):
        """Refused with this status, saying these words on standard error and nothing on standard output."""
        done = self.run_program(*arguments, **options)
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}\n{done.stderr}")
        self.assertEqual(done.stdout, "")
        for word in words:
            self.assertIn(str(word).lower(), done.stderr.lower(), f"of {arguments}")
        return done
