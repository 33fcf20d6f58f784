"""Who answers in which thread?  A temporal graph network with a memory of each node.

Events come in the order of time.  Each node has a memory and a letter box with the last message to
it; a step first reads the letters of the nodes it needs, then tells true replies from made-up ones.
"""

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


def make_events(count, people, threads, topics, days, seed):
    """Replies (person, thread, seconds, traits); people keep to one topic."""
    g = torch.Generator().manual_seed(seed)
    seconds = (torch.rand(count, generator=g).sort().values * days * 86_400).round()
    thread = (torch.rand(count, generator=g) ** 3 * threads).long()
    topic_of_thread = torch.randint(topics, (threads,), generator=g)
    person = (torch.rand(count, generator=g) ** 2 * (people // topics)).long() * topics
    person = person + topic_of_thread[thread]
    traits = torch.randn(count, 16, generator=g)
    traits[:, :4] += F.one_hot(topic_of_thread[thread] % 4, 4)
    return person, people + thread, seconds, traits


class Clock(nn.Module):
    """Times since the last event, as fading traces of many speeds and their logarithm."""

    def __init__(self, speeds=15):
        super().__init__()
        self.register_buffer("scale", torch.logspace(1, 6, speeds))
        self.size = speeds + 1

    def forward(self, since):
        since = since.unsqueeze(1)
        return torch.cat([1 / (1 + since / self.scale), since.log1p() / 10], dim=1)


class Memory:
    """State, last letter and time of the last event of all nodes."""

    def __init__(self, nodes, width, letter):
        self.state = torch.zeros(nodes, width)
        self.letter = torch.zeros(nodes, letter)
        self.time = torch.zeros(nodes)

    def put(self, nodes, state):
        self.state.index_copy_(0, nodes, state)

    def post(self, nodes, letters, times):
        self.letter.index_copy_(0, nodes, letters)
        self.time.index_copy_(0, nodes, times)


class TGN(nn.Module):
    def __init__(self, nodes, width, traits):
        super().__init__()
        self.clock = Clock()
        self.fixed = nn.Embedding(nodes, width, sparse=True)
        nn.init.normal_(self.fixed.weight, std=0.1)
        self.read = nn.GRUCell(width + traits + self.clock.size, width)
        self.mix = nn.Sequential(
            nn.Linear(2 * width + self.clock.size, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
        )
        self.pair = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, nodes, memory, now):
        fade = self.clock((now - memory.time[nodes]).clamp(min=0))
        state = self.read(torch.cat([memory.letter[nodes], fade], dim=1), memory.state[nodes])
        return state, self.mix(torch.cat([state, self.fixed(nodes), fade], dim=1))

    def score(self, one, other):
        return self.pair(torch.cat([one, other], dim=1)).squeeze(1)


def parse(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=sys.maxsize)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--people", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=30_000)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    torch.manual_seed(13)
    events = make_events(args.events, args.people, args.threads, 20, days=60, seed=13)
    nodes = args.people + args.threads
    model = TGN(nodes, args.width, traits=16)
    dense = [p for name, p in model.named_parameters() if name != "fixed.weight"]
    adam = torch.optim.Adam(dense, lr=1e-3, fused=True)
    sgd = torch.optim.SGD([model.fixed.weight], lr=1.0)

    step = 0
    for epoch in range(args.epochs):
        memory = Memory(nodes, args.width, args.width + 16)
        losses = []
        for person, thread, seconds, traits in zip(*[e.split(args.batch_size) for e in events]):
            wrong = torch.randint(args.people, nodes, thread.shape)
            every, place = torch.cat([person, thread, wrong]).unique(return_inverse=True)
            state, z = model(every, memory, seconds[0])
            who, where, elsewhere = z[place].chunk(3)
            gap = model.score(who, where) - model.score(who, elsewhere)
            loss = F.softplus(-gap).mean()
            adam.zero_grad()
            sgd.zero_grad()
            loss.backward()
            adam.step()
            sgd.step()

            memory.put(every, state.detach())
            for mine, theirs in ((person, where), (thread, who)):
                memory.post(mine, torch.cat([theirs.detach(), traits], dim=1), seconds)
            losses.append(loss.detach())
            step += 1
            if step % 100 == 0:
                mean = torch.stack(losses[-100:]).mean().item()
                print(f"epoch {epoch} step {step} loss {mean:.4f} ({math.exp(-mean):.3f})")
            if step == args.steps:
                return


if __name__ == "__main__":
    main()
