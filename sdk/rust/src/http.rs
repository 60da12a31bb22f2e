//! Requests, responses, bodies, and the client for outbound requests.
//!
//! The same [`Request`] is what a handler receives and what it sends; the same
//! [`Response`] is what it receives from elsewhere and what it answers with. So a proxy is
//!
//! ```no_run
//! # use mayfly::{Request, Response};
//! #[mayfly::http]
//! async fn proxy(_request: Request) -> Result<Response, mayfly::Error> {
//!     Ok(mayfly::http::get("https://api.example.com/prices").await?)
//! }
//! ```
//!
//! and its body streams through without being held in memory. Outbound requests are
//! denied unless the function's `egress` lists their destination.

mod body;
mod client;
mod error;
mod headers;
mod method;
mod query;
mod request;
mod response;

pub use body::{BODY_BYTES_MAX, Body, BodyWriter};
pub use client::{get, post, send};
pub use error::{HttpError, HttpErrorKind};
pub use headers::Headers;
pub use method::Method;
pub use request::Request;
pub use response::{IntoResponse, Json, Response};

pub(crate) use body::Content;
