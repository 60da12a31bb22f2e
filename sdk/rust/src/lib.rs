//! Write [Mayfly](https://github.com/mayfly-dev/mayfly) functions in Rust.
//!
//! A function is an `async fn` with an attribute. It is compiled to a WebAssembly
//! component that exports `wasi:http/incoming-handler@0.2`, so it runs on Mayfly and
//! on any other host of that interface.
//!
//! ```
//! use mayfly::{Error, Request, Response};
//!
//! #[mayfly::http]
//! async fn hello(request: Request) -> Result<Response, Error> {
//!     let name = request.query("name").unwrap_or_else(|| "world".to_owned());
//!     mayfly::log::info!(name = name; "greeting");
//!     Ok(Response::text(format!("Hello, {name}!\n")))
//! }
//!
//! // The handler is an ordinary function, so it can be tested on the host.
//! let response = mayfly::block_on(hello(Request::get("/?name=Ada"))).unwrap();
//! assert_eq!(response.status(), 200);
//! assert_eq!(mayfly::block_on(response.into_body().text()).unwrap(), "Hello, Ada!\n");
//! ```
//!
//! An *event* function takes any type that deserializes and returns any type that
//! serializes; workflows, queues and `mayfly invoke` call it with JSON:
//!
//! ```
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Deserialize)]
//! struct Order { item: String, count: u32 }
//!
//! #[derive(Serialize)]
//! struct Receipt { total_cents: u32 }
//!
//! #[mayfly::event]
//! async fn price(order: Order) -> Result<Receipt, mayfly::Error> {
//!     match order.item.as_str() {
//!         "tea" => Ok(Receipt { total_cents: 250 * order.count }),
//!         other => Err(mayfly::Error::new("UnknownItem", format!("no price for {other:?}"))),
//!     }
//! }
//! # let order = Order { item: "tea".into(), count: 2 };
//! # assert_eq!(mayfly::block_on(price(order)).unwrap().total_cents, 500);
//! ```
//!
//! Contents: [`mod@http`] has requests, responses, bodies and the outbound client; [`config`] reads the function's
//! settings; [`log`] writes structured lines; [`time`] sleeps; [`Error`] is the error of a failed call.
//!
//! What does not belong here: anything that requires Mayfly itself. This crate depends only on WASI, never on the
//! platform's crates.

// Lets the examples above and the expansion of the attributes refer to this crate by its public name.
extern crate self as mayfly;

pub mod config;
mod error;
mod executor;
pub mod http;
pub mod log;
#[doc(hidden)]
pub mod rt;
pub mod time;

pub use error::Error;
pub use executor::block_on;
pub use http::{IntoResponse, Json, Request, Response};
pub use mayfly_sdk_macros::{event, http};
#[doc(hidden)]
pub use rt as __rt;
