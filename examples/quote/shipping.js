// The price of shipping an order, by weight: an HTTP handler, which a workflow calls with POST like any other function.

const TIERS = [
  { upToGrams: 1000, cents: 499 },
  { upToGrams: 5000, cents: 899 },
];

export async function fetch(request) {
  const { grams } = await request.json();
  const tier = TIERS.find(({ upToGrams }) => grams <= upToGrams);
  if (!tier) {
    const error = { errorType: "TooHeavy", errorMessage: `${grams} g exceeds the weight limit of a parcel` };
    return Response.json(error, { status: 422 });
  }
  return Response.json({ shippingCents: tier.cents });
}
