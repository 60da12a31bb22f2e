// The price of shipping an order, by weight: an HTTP handler, which a workflow calls with a POST as it does any.

const TIERS = [
  { upToGrams: 1000, cents: 499 },
  { upToGrams: 5000, cents: 899 },
];

export async function fetch(request) {
  const { grams } = await request.json();
  const tier = TIERS.find(({ upToGrams }) => grams <= upToGrams);
  if (!tier) {
    const error = { errorType: "TooHeavy", errorMessage: `${grams} g is more than a parcel takes` };
    return Response.json(error, { status: 422 });
  }
  return Response.json({ shippingCents: tier.cents });
}
