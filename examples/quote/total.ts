// The total of a quote, formatted for display.

import { log } from "mayfly";

interface Quote {
  netCents: number;
  taxCents: number;
  shippingCents: number;
}

export function handle({ netCents, taxCents, shippingCents }: Quote): { totalCents: number; text: string } {
  const totalCents = netCents + taxCents + shippingCents;
  log.info("quoted", { totalCents });
  return { totalCents, text: `€ ${(totalCents / 100).toFixed(2)}` };
}
