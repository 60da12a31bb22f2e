//! The memory that the host holds for a guest outside its linear memories: headers, names, body data in transit.
//!
//! Each of these has a size limit and a count limit, but their product exceeds a guest's memory. So the total bytes are
//! counted and charged like memory whenever a running guest yields its thread, at every tick. Little can accumulate
//! between two ticks, and a request that ends before the first one costs nothing.

use std::any::Any;

use wasmtime_wasi::ResourceTable;
use wasmtime_wasi_http::{
    FieldMap,
    p2::{
        bindings::http::types::{Method, Scheme},
        types::{HostFutureIncomingResponse, HostOutgoingRequest, HostOutgoingResponse},
    },
    p3,
};

use crate::capability::response_body;

/// The largest number of handles that a guest may hold.
pub(super) const HANDLES_MAX: usize = 8192;
/// The largest number of concurrent tasks, streams and futures of a 0.3 component.
pub(crate) const CONCURRENT_MAX: usize = 16 << 10;
/// The maximum size of one message's headers, with the host's overhead, in bytes. Exceeding it ends the guest,
/// so it is twice the largest head that the gateway accepts: a guest that forwards a request's headers must not reach
/// it.
pub(super) const FIELD_BYTES_MAX: usize = 128 << 10;
/// The maximum number of bytes in one write of a body by a guest.
pub(crate) const BODY_CHUNK_BYTES_MAX: usize = 64 << 10;

/// The maximum number of bytes in flight of one body: the chunk that is being sent, and the next.
const BODY_BYTES: usize = 2 * BODY_CHUNK_BYTES_MAX;
/// The size of a handle: its table entry, and a small heap value.
const HANDLE_BYTES: usize = 256;
/// The overhead of a header in addition to its name and its value.
const HEADER_BYTES: usize = 64;
/// Pending requests that are not charged for a body: few have one, and connections have their own limit.
const PENDING_FREE: usize = 256;

/// The bytes that a guest's handles hold on the host: large ones are measured, the rest estimated.
pub(super) fn bytes(table: &mut ResourceTable) -> u64 {
    let (mut bytes, mut pending) = (0, 0_usize);
    for entry in table.iter_mut() {
        let entry: &dyn Any = &*entry;
        bytes += HANDLE_BYTES + bytes_of(entry);
        pending += usize::from(entry.is::<HostFutureIncomingResponse>());
    }
    (bytes + pending.saturating_sub(PENDING_FREE) * BODY_BYTES) as u64
}

fn bytes_of(entry: &dyn Any) -> usize {
    let body = |there: bool| if there { BODY_BYTES } else { 0 };
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
    if let Some(headers) = entry.downcast_ref::<FieldMap>() {
        header_bytes(headers)
    } else if let Some(request) = entry.downcast_ref::<HostOutgoingRequest>() {
        let method = if let Method::Other(name) = &request.method { name.capacity() } else { 0 };
        let scheme = if let Some(Scheme::Other(name)) = &request.scheme { name.capacity() } else { 0 };
        let names = method + scheme + text(&request.authority) + text(&request.path_with_query);
        names + header_bytes(&request.headers) + body(request.body.is_some())
    } else if let Some(response) = entry.downcast_ref::<HostOutgoingResponse>() {
        header_bytes(&response.headers) + body(response.body.is_some())
    } else if let Some(request) = entry.downcast_ref::<p3::Request>() {
        let authority = request.authority.as_ref().map_or(0, |authority| authority.as_str().len());
        let path = request.path_with_query.as_ref().map_or(0, |path| path.as_str().len());
        request.method.as_str().len() + authority + path + header_bytes(&request.headers)
    } else if let Some(response) = entry.downcast_ref::<p3::Response>() {
        header_bytes(&response.headers)
    } else {
        response_body::bytes_ahead(entry).unwrap_or(0)
    }
}

fn header_bytes(headers: &FieldMap) -> usize {
    headers.iter().map(|(name, value)| HEADER_BYTES + name.as_str().len() + value.len()).sum()
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Empty};

    use super::*;

    #[test]
    fn large_host_resources_are_counted() {
        let mut table = ResourceTable::new();
        assert_eq!(bytes(&mut table), 0);
        let mut headers = FieldMap::new_mutable(FIELD_BYTES_MAX);
        let long = http::HeaderValue::from_bytes(&[b'x'; 30_000]).unwrap();
        headers.append_raw(http::header::COOKIE, long).unwrap();
        let held = table.push(headers.clone()).unwrap();
        let one = bytes(&mut table);
        assert!((30_000..31_000).contains(&one), "{one}");
        table.delete(held).unwrap();
        assert_eq!(bytes(&mut table), 0, "what it let go of is not counted");

        let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
        let request = HostOutgoingRequest {
            method: Method::Other("x".repeat(20_000)),
            scheme: None,
            authority: Some("y".repeat(10_000)),
            path_with_query: None,
            headers,
            body: Some(body),
        };
        table.push(request).unwrap();
        let one = bytes(&mut table) - BODY_BYTES as u64;
        assert!((60_000..61_000).contains(&one), "{one}");
    }
}
