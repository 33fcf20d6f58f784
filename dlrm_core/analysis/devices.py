"""GPUs by name with their data sheets' figures (:mod:`dlrm_core.data_sheets`), as a table."""

from __future__ import annotations

import pandas as pd

from dlrm_core.data_sheets import DATA_SHEET, DEVICES, Device, device, device_of_driver

__all__ = ["DATA_SHEET", "DEVICES", "Device", "device", "device_of_driver", "devices_table"]


def devices_table() -> pd.DataFrame:
    """All listed GPUs: ``name``, ``PRECISION_tflops`` (NaN: no unit for it), ``memory_gb``,
    ``memory_gb_per_s``, ``link_gb_per_s``, ``peer_gb_per_s``, ``source``."""
    return pd.DataFrame(
        [
            {
                "name": known.name,
                **{
                    f"{precision}_tflops": known.tflops.get(precision, float("nan"))
                    for precision in ("fp32", "tf32", "bf16", "fp16")
                },
                "memory_gb": known.memory_gb,
                "memory_gb_per_s": known.memory_gb_per_s,
                "link_gb_per_s": known.link_gb_per_s,
                "peer_gb_per_s": known.peer_gb_per_s,
                "source": known.source,
            }
            for known in DEVICES
        ]
    )
