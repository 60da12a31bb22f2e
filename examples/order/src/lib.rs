//! The steps of an order, and their compensations.
//!
//! `mayfly invoke order -d '{"step": "charge", "order": {"id": "o-1", "item": "mug", "quantity": 2, "card": "4242"}}'`

use mayfly::Error;
use serde::{Deserialize, Serialize};

/// The number of mugs in stock.
const STOCK: u32 = 10;

#[derive(Deserialize)]
struct Work {
    step: Step,
    order: Order,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Step {
    Reserve,
    Charge,
    Ship,
    Refund,
    Release,
}

#[derive(Deserialize)]
struct Order {
    id: String,
    item: String,
    quantity: u32,
    card: String,
    #[serde(default)]
    address: String,
}

#[derive(Serialize)]
struct Done {
    done: String,
}

#[mayfly::event]
async fn order(work: Work) -> Result<Done, Error> {
    let Order { id, item, quantity, card, address } = work.order;
    let done = match work.step {
        Step::Reserve if quantity > STOCK => {
            return Err(Error::new("OutOfStock", format!("{quantity} of {item} are not in stock")));
        }
        Step::Charge if card == "declined" => {
            return Err(Error::new("CardDeclined", format!("the card of order {id} was declined")));
        }
        Step::Ship if address.is_empty() => {
            return Err(Error::new("NoAddress", format!("order {id} has no address")));
        }
        Step::Reserve => format!("reserved {quantity} of {item}"),
        Step::Charge => format!("charged card {card}"),
        Step::Ship => format!("sent to {address}"),
        Step::Refund => format!("refunded card {card}"),
        Step::Release => format!("released {quantity} of {item}"),
    };
    mayfly::log::info!(order = id; "{done}");
    Ok(Done { done })
}
