"""What energy and device time cost, by the user's own factors (the table [report] of a TOML file). Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Factors:
    """What the user says a kilowatt-hour and a GPU-hour cost; None: not said, so nothing is shown."""

    price_per_kwh: float | None = None
    price_per_gpu_hour: float | None = None
    co2_g_per_kwh: float | None = None
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job cost, by the user's factors; None: no factor, or nothing measured."""

    energy: float | None
    gpu_time: float | None
    total: float | None  # of what there is of the two
    currency: str | None
    co2_kg: float | None


def make_bill(factors: Factors, energy_wh: float | None, gpu_hours: float) -> Bill | None:
    """Return the bill; None: there is nothing to say."""
    kwh = None if energy_wh is None else energy_wh / 1000
    energy = _times(kwh, factors.price_per_kwh)
    gpu_time = _times(gpu_hours, factors.price_per_gpu_hour)
    grams = _times(kwh, factors.co2_g_per_kwh)
    if energy is None and gpu_time is None and grams is None:
        return None
    parts = [part for part in (energy, gpu_time) if part is not None]
    total = sum(parts) if parts else None
    return Bill(energy, gpu_time, total, factors.currency, None if grams is None else grams / 1000)


def _times(amount: float | None, factor: float | None) -> float | None:
    return None if amount is None or factor is None else amount * factor
