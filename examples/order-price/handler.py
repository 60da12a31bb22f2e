"""The price of an order, with a discount for large quantities: the first step of the workflow in `examples/order`."""

from decimal import ROUND_HALF_UP, Decimal

PRICE_CENTS = {"mug": 795, "plate": 1250}

DISCOUNT_QUANTITY = 10
DISCOUNT_PERCENT = Decimal("12.5")


class UnknownItem(Exception):
    status = 422


def handle(order):
    each = PRICE_CENTS.get(order["item"])
    if each is None:
        raise UnknownItem(f"{order['item']} is not for sale")
    total = Decimal(each * order["quantity"])
    if order["quantity"] >= DISCOUNT_QUANTITY:
        total -= total * DISCOUNT_PERCENT / 100
    return {"totalCents": int(total.quantize(Decimal("1"), ROUND_HALF_UP))}
