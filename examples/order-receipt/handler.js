// The receipt of an order: the last step of the workflow in `examples/order`.

import { log } from "mayfly";

export function handle({ id, item, quantity, address, price }) {
  const total = `€ ${(price.totalCents / 100).toFixed(2)}`;
  log.info("receipt", { order: id, total });
  return { text: `Order ${id}: ${quantity} × ${item}, ${total}, sent to ${address}` };
}
