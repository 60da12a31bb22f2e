//! A client for HTTP and HTTPS requests to servers other than the API server.

use std::error::Error;

use bytes::Bytes;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};

pub type HttpsClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

pub fn new() -> HttpsClient {
    let connector =
        HttpsConnectorBuilder::new().with_webpki_roots().https_or_http().enable_all_versions().build();
    Client::builder(TokioExecutor::new()).build(connector)
}

/// The innermost cause, such as "connection refused" rather than "client error".
pub fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
