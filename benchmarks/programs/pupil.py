"""Distillation: a small network learns from the labels and from a larger one's answers."""

import argparse
import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 20


@dataclass
class Config:
    steps: int = 100_000
    batch: int = 32
    images: int = 2048
    lr: float = 0.05
    temperature: float = 4.0
    alpha: float = 0.7
    decay: float = 0.999
    teacher: str = ""
    report: int = 25


def unit(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Net(nn.Module):
    def __init__(self, widths, depth):
        super().__init__()
        units, inputs = [unit(3, widths[0])], widths[0]
        for stage, width in enumerate(widths):
            units.append(unit(inputs, width, 1 if stage == 0 else 2))
            units += [unit(width, width) for _ in range(depth - 1)]
            inputs = width
        self.features = nn.Sequential(*units)
        self.classify = nn.Linear(inputs, CLASSES)

    def forward(self, x):
        return self.classify(self.features(x).mean((2, 3)))


def make_images(config):
    labels = torch.randint(0, CLASSES, (config.images,))
    patterns = torch.randn(CLASSES, 3, 32, 32)
    return patterns[labels] + 0.8 * torch.randn(config.images, 3, 32, 32), labels


def augment(images):
    """Turn each image by up to 15 degrees and shift it a little."""
    angle = (torch.rand(len(images)) * 2 - 1) * math.pi / 12
    shift = (torch.rand(len(images), 2) * 2 - 1) * 0.1
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([cos, -sin, shift[:, 0]], dim=1)
    second = torch.stack([sin, cos, shift[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), images.shape, align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def load_teacher(config):
    teacher = Net((32, 64, 128), depth=2)
    if config.teacher:
        teacher.load_state_dict(torch.load(config.teacher, weights_only=True))
    return teacher.eval().requires_grad_(False)


@torch.no_grad()
def ask(teacher, images):
    return teacher(images)


def distill_loss(logits, answers, labels, config):
    soft = F.kl_div(
        F.log_softmax(logits / config.temperature, dim=1),
        F.softmax(answers / config.temperature, dim=1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(logits, labels)
    return config.alpha * config.temperature**2 * soft + (1 - config.alpha) * hard


@torch.no_grad()
def update_average(average, student, decay):
    for kept, new in zip(average.parameters(), student.parameters()):
        kept.lerp_(new, 1 - decay)
    for kept, new in zip(average.buffers(), student.buffers()):
        kept.copy_(new)


def train(config):
    torch.manual_seed(29)
    images, labels = make_images(config)
    teacher = load_teacher(config)
    student = Net((16, 32, 64), depth=3)
    average = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=config.lr, momentum=0.9, nesterov=True)

    for step in range(config.steps):
        rows = torch.randint(0, len(images), (config.batch,))
        x, y = augment(images[rows]), labels[rows]
        answers = ask(teacher, x)
        logits = student(x)
        loss = distill_loss(logits, answers, y, config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_average(average, student, config.decay)
        if step % config.report == 0:
            correct = (logits.argmax(1) == y).float().mean().item()
            print(f"step {step} | loss {loss.item():.3f} | accuracy {correct:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    train(Config(**vars(parser.parse_args())))
