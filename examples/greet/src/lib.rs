//! An event function: JSON in, JSON out, typed errors.
//!
//! `mayfly invoke greet -d '{"name": "Ada"}'`

use mayfly::Error;
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Person {
    name: String,
}

#[derive(Serialize)]
struct Greeting {
    message: String,
}

#[mayfly::event]
async fn greet(person: Person) -> Result<Greeting, Error> {
    if person.name.is_empty() {
        return Err(Error::new("NoName", "a person needs a name").with_status(422));
    }
    let greeting = mayfly::config::get("GREETING").unwrap_or_else(|| "Hello".to_owned());
    Ok(Greeting { message: format!("{greeting}, {}!", person.name) })
}
