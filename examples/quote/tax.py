"""The tax of an order, by country. A country without a rate is an error that the workflow handles."""

from decimal import ROUND_HALF_UP, Decimal

PERCENT = {"DE": Decimal("19"), "FR": Decimal("20"), "CH": Decimal("8.1")}


class UnknownCountry(Exception):
    status = 422


def handle(order):
    percent = PERCENT.get(order["country"])
    if percent is None:
        raise UnknownCountry(f"no tax rate for {order['country']}")
    tax = Decimal(order["netCents"]) * percent / 100
    return {"taxCents": int(tax.quantize(Decimal("1"), ROUND_HALF_UP))}
