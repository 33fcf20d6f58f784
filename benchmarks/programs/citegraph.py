"""Graph convolutions over a citation graph, written with plain functions and a dict of weights."""

import argparse
import functools

import torch
import torch.nn.functional as F

NODES, LINKS, INPUTS, HIDDEN, TOPICS = 3000, 50000, 300, 256, 30


def make_graph(generator):
    """Links mostly within a topic; features are a noisy trace of the topic."""
    topic = torch.randint(TOPICS, (NODES,), generator=generator)
    order = topic.argsort()
    place = torch.randint(NODES, (LINKS,), generator=generator)
    hop = torch.randint(-60, 61, (LINKS,), generator=generator)
    source = order[place]
    target = order[(place + hop) % NODES]
    links = torch.cat([torch.stack([source, target]), torch.stack([target, source])], dim=1)
    traces = torch.randn(TOPICS, INPUTS, generator=generator)
    features = traces[topic] + 3 * torch.randn(NODES, INPUTS, generator=generator)
    return links, features, topic


def normalised(links):
    """The adjacency with self links, divided by the roots of both degrees."""
    own = torch.arange(NODES)
    indices = torch.cat([links, torch.stack([own, own])], dim=1)
    adjacency = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]), (NODES, NODES))
    adjacency = adjacency.coalesce()
    rows, columns = adjacency.indices()
    degree = torch.zeros(NODES).index_add_(0, rows, adjacency.values())
    scale = degree.rsqrt()
    values = scale[rows] * adjacency.values() * scale[columns]
    return torch.sparse_coo_tensor(adjacency.indices(), values, (NODES, NODES)).coalesce()


def init_weights(generator):
    shapes = {"in": (INPUTS, HIDDEN), "mid": (HIDDEN, HIDDEN), "out": (HIDDEN, TOPICS)}
    weights = {}
    for name, (rows, columns) in shapes.items():
        weight = torch.randn(rows, columns, generator=generator) * (2 / rows) ** 0.5
        weights[name] = weight.requires_grad_()
        weights[f"{name}.bias"] = torch.zeros(columns, requires_grad=True)
    return weights


def convolve(weights, name, adjacency, x):
    return torch.sparse.mm(adjacency, x @ weights[name]) + weights[f"{name}.bias"]


def predict(weights, adjacency, x):
    x = F.relu(convolve(weights, "in", adjacency, x))
    x = x + F.relu(convolve(weights, "mid", adjacency, x))
    return convolve(weights, "out", adjacency, x)


def objective(predictor, weights, topic, known):
    logits = predictor(weights)
    return F.cross_entropy(logits[known], topic[known], label_smoothing=0.1), logits


def main(steps, lr, every):
    generator = torch.Generator().manual_seed(99)
    links, features, topic = make_graph(generator)
    known = torch.randperm(NODES, generator=generator)[:2400]
    adjacency = normalised(links)
    weights = init_weights(generator)
    predictor = functools.partial(predict, adjacency=adjacency, x=features)
    optimizer = torch.optim.Adam(weights.values(), lr=lr, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(steps, 1))
    for step in range(steps):
        optimizer.zero_grad()
        loss, logits = objective(predictor, weights, topic, known)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            right = (logits.argmax(1) == topic).float().mean()
            print(f"step {step + 1}: loss {loss.item():.3f}, accuracy {right.item():.3f}")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=100_000)
    flags.add_argument("--lr", type=float, default=5e-3)
    flags.add_argument("--every", type=int, default=60)
    main(**vars(flags.parse_args()))
