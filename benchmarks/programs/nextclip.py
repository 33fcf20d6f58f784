"""Which clip is watched next: a GRU over the clips of a session, with a sampled softmax.

Clips have unit length, so the score of a clip is its cosine to the state of the session.
"""

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    clips: int = 120_000
    dim: int = 64
    hidden: int = 160
    length: int = 24
    batch: int = 128
    negatives: int = 1024
    temperature: float = 0.1


class SessionModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.clips = nn.Embedding(cfg.clips, cfg.dim, sparse=True)
        self.gru = nn.GRU(cfg.dim, cfg.hidden, batch_first=True)
        self.project = nn.Linear(cfg.hidden, cfg.dim)
        self.temperature = cfg.temperature

    def session_state(self, watched, lengths):
        states, _ = self.gru(self.clips(watched))
        rows = torch.arange(len(lengths))
        last = states[rows, lengths - 1]
        return F.normalize(self.project(last), dim=1)

    def forward(self, watched, lengths, candidates):
        """Scores of the candidate clips, the same ones for each session."""
        return self.session_state(watched, lengths) @ self.clips(candidates).T / self.temperature


class Sessions:
    """Walks over the catalogue: who watches a clip tends to watch one with a near number."""

    def __init__(self, cfg, count, generator):
        self.cfg = cfg
        self.generator = generator
        start = torch.randint(cfg.clips, (count, 1), generator=generator)
        hops = torch.randint(-20, 21, (count, cfg.length), generator=generator)
        self.walks = (start + hops.cumsum(1)) % cfg.clips
        self.lengths = torch.randint(4, cfg.length, (count,), generator=generator)

    def batch(self):
        rows = torch.randint(len(self.walks), (self.cfg.batch,), generator=self.generator)
        walks, lengths = self.walks[rows], self.lengths[rows]
        following = walks.gather(1, lengths[:, None]).squeeze(1)
        return walks[:, :-1], lengths, following

    def negatives(self):
        return torch.randint(self.cfg.clips, (self.cfg.negatives,), generator=self.generator)


@torch.no_grad()
def back_to_sphere(model, touched):
    rows = touched.unique()
    weight = model.clips.weight
    weight[rows] = F.normalize(weight[rows], dim=1)


class Meter:
    """How often the next clip is among the twenty candidates that score best."""

    def __init__(self):
        self.hits = torch.zeros(())
        self.seen = 0

    def update(self, scores, candidates):
        top = scores.detach().topk(20, dim=1).indices
        self.hits += (top == torch.arange(len(scores))[:, None]).sum()
        self.seen += len(scores)

    def value(self):
        return self.hits.item() / max(self.seen, 1)


def train(args):
    torch.manual_seed(11)
    cfg = Config()
    generator = torch.Generator().manual_seed(12)
    sessions = Sessions(cfg, 40_000, generator)
    model = SessionModel(cfg)
    back_to_sphere(model, torch.arange(cfg.clips))
    sparse = torch.optim.SparseAdam([model.clips.weight], lr=args.lr)
    dense = torch.optim.Adam([*model.gru.parameters(), *model.project.parameters()], lr=args.lr)
    meter = Meter()
    began = time.time()
    for step in range(1, args.steps + 1):
        watched, lengths, following = sessions.batch()
        candidates = torch.cat([following, sessions.negatives()])
        scores = model(watched, lengths, candidates)
        loss = F.cross_entropy(scores, torch.arange(len(following)))
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        back_to_sphere(model, torch.cat([watched.flatten(), candidates]))
        meter.update(scores, candidates)
        if step % 100 == 0:
            spent = time.time() - began
            print(f"{step:6d}  loss {loss.item():.3f}  hit@20 {meter.value():.3f}  {spent:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    train(parser.parse_args())
