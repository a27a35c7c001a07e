"""Schedules against PyTorch's own: what it computes, reads, adds and dumps. Skipped where torch is not installed."""
import importlib.util
import unittest

from support import Case

TORCH = importlib.util.find_spec("torch") is not None
NAMED = (("gpipe", 1), ("1f1b", 1), ("zbh1", 1), ("zbh2", 1), ("looped-bfs", 2), ("looped-bfs", 4), ("interleaved", 2),
         ("interleaved", 4), ("interleaved-zb", 3), ("zbv", 2), ("v-half", 2), ("v-min", 2), ("1f1b-v", 2),
         ("dualpipev", 2))


def text_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return file.read().replace("\r\n", "\n")


@unittest.skipUnless(TORCH, "torch is not installed")
class PyTorch(Case):
    @staticmethod
    def runtime(ranks, stages, microbatches):
        """PyTorch's schedule without stages and process groups: what reads, lowers and dumps needs neither."""
        from torch.distributed.pipelining import schedules
        runtime = object.__new__(schedules._PipelineScheduleRuntime)
        runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = ranks, stages, microbatches
        runtime.pipeline_order, runtime._stages = {}, []
        return runtime

    def test_pytorch_reads_every_order_and_adds_the_same_communication(self):
        compared = 0
        for name, chunks in NAMED:
            for ranks in (1, 2, 3, 4):
                sizes = ("--ranks", str(ranks), "--chunks", str(chunks), "--microbatches", str(4 * ranks))
                with self.subTest(name=name, sizes=sizes):
                    order = self.succeed("schedule", name, *sizes).stdout
                    self.write("order.csv", order)
                    runtime = self.runtime(ranks, ranks * chunks, 4 * ranks)
                    runtime._load_csv(self.path("order.csv"))
                    runtime._dump_csv(self.path("moves.csv"), format="compute_comms")
                    runtime._dump_csv(self.path("again.csv"), format="compute_only")
                    self.assertEqual(text_of(self.path("again.csv")), order)
                    moves = self.succeed("schedule", name, *sizes, "--format", "compute_comms").stdout
                    self.assertEqual(moves, text_of(self.path("moves.csv")))
                    for file in ("moves.csv", "again.csv"):
                        self.assertTrue(self.document("check", file)["certified"])
                        self.assertEqual(self.succeed("schedule", file).stdout, order)
                    compared += 1
        self.assertEqual(compared, 4 * len(NAMED))

    def test_dualpipev_is_what_pytorch_computes(self):
        from torch.distributed.pipelining import schedules
        for ranks in range(1, 9):
            for microbatches in range(2 * ranks, 2 * ranks + 4):
                theirs = object.__new__(schedules.ScheduleDualPipeV)
                theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
                rows = [",".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(ranks)]
                ours = self.succeed("schedule", "dualpipev", "--ranks", str(ranks), "--microbatches", str(microbatches))
                self.assertEqual(ours.stdout.splitlines(), rows)


if __name__ == "__main__":
    unittest.main(verbosity=2)
