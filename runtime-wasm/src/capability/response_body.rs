//! The body of a 0.2 guest's response, between the guest that writes it and the reader.
//!
//! Replaces the implementation of wasmtime-wasi-http, which uses two channels (one for the bytes, one for the end),
//! allocates five futures for a small write, and bounds the number of pieces instead of bytes. Here it is one queue
//! behind one lock. Bodies of outbound requests keep the implementation of wasmtime-wasi-http.
//!
//! ```text
//! open ──finish──▶ ended (with trailers or without)
//!   │ ──dropped by the guest, or content-length mismatch──▶ failed
//!   └ ──the instance is dropped──▶ abandoned: the reader sees an end, the caller knows the failure
//! ```

use std::{
    any::Any,
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{HeaderMap, header::CONTENT_LENGTH};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use wasmtime::{
    StoreContextMut,
    component::{Linker, Resource, ResourceTable, ResourceTableError, ResourceType},
};
use wasmtime_wasi::p2::{DynOutputStream, OutputStream, Pollable, StreamError, StreamResult};
use wasmtime_wasi_http::{
    Error, FieldMap, WasiHttpView as _,
    p2::{
        bindings::http::types::{ErrorCode, HostOutgoingBody as _},
        body::HostOutgoingBody,
        types::HostOutgoingResponse,
    },
};

use crate::guest::StoreData;

/// The interface whose functions are replaced here, as wasmtime-wasi-http names it.
const TYPES: &str = "wasi:http/types@0.2.12";
/// Bytes that a guest may write ahead of the reader.
const AHEAD_BYTES_MAX: usize = 64 << 10;

/// Replaces wasmtime-wasi-http's functions of response bodies.
pub(super) fn link(linker: &mut Linker<StoreData>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    let mut types = linker.instance(TYPES)?;
    let body = ResourceType::host::<HostOutgoingBody>();
    types.resource("outgoing-body", body, |mut store, rep| {
        let id = Resource::new_own(rep);
        let guest = store.data_mut();
        match guest.http().table.get(&ours(&id)) {
            Ok(_) => close(guest.http().table, &id)?.0.lock().end(End::Broken),
            Err(_) => guest.http().drop(id)?,
        }
        Ok(())
    })?;
    types.func_wrap(
        "[method]outgoing-response.body",
        |mut store: StoreContextMut<'_, StoreData>, (response,): (Resource<HostOutgoingResponse>,)| {
            Ok((open(store.data_mut().http().table, &response)?,))
        },
    )?;
    types.func_wrap(
        "[method]outgoing-body.write",
        |mut store: StoreContextMut<'_, StoreData>, (body,): (Resource<HostOutgoingBody>,)| {
            let mut http = store.data_mut().http();
            match http.table.get_mut(&ours(&body)) {
                Ok(_) => Ok((write(http.table, &body)?,)),
                Err(_) => Ok((http.write(body)?,)),
            }
        },
    )?;
    types.func_wrap(
        "[static]outgoing-body.finish",
        |mut store: StoreContextMut<'_, StoreData>,
         (body, trailers): (Resource<HostOutgoingBody>, Option<Resource<FieldMap>>)| {
            let mut http = store.data_mut().http();
            match http.table.get(&ours(&body)) {
                Ok(_) => Ok((finish(http.table, &body, trailers)?,)),
                Err(_) => match http.finish(body, trailers) {
                    Ok(()) => Ok((Ok(()),)),
                    Err(error) => Ok((Err(error.downcast()?),)),
                },
            }
        },
    )?;
    linker.allow_shadowing(false);
    Ok(())
}

/// Unread bytes, if this table entry is the guest's end of a body.
pub(crate) fn bytes_ahead(entry: &dyn Any) -> Option<usize> {
    entry.downcast_ref::<GuestEnd>().map(|body| body.0.lock().ahead)
}

/// The guest's end of the body, stored in the instance's table in place of wasmtime-wasi-http's type.
struct GuestEnd(HostContext);

/// The same entry of the table under its real type, which this module created.
fn ours(id: &Resource<HostOutgoingBody>) -> Resource<GuestEnd> {
    match id.owned() {
        true => Resource::new_own(id.rep()),
        false => Resource::new_borrow(id.rep()),
    }
}

/// `Err`: the response already has a body, or its content-length is invalid.
fn open(
    table: &mut ResourceTable,
    response: &Resource<HostOutgoingResponse>,
) -> wasmtime::Result<Result<Resource<HostOutgoingBody>, ()>> {
    let response = table.get_mut(response)?;
    if response.body.is_some() {
        return Ok(Err(()));
    }
    let Ok(announced) = announced(&response.headers) else { return Ok(Err(())) };
    let shared = HostContext::new(announced);
    response.body = Some(Reader(shared.clone()).boxed_unsync());
    let id = table.push(GuestEnd(shared))?;
    Ok(Ok(Resource::new_own(id.rep())))
}

/// The content-length of a response's headers. An invalid value, or several, cannot be sent (RFC 9110, section 8.6).
fn announced(headers: &HeaderMap) -> Result<Option<u64>, ()> {
    let mut values = headers.get_all(CONTENT_LENGTH).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let digits = value.as_bytes();
    if values.next().is_some() || digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(());
    }
    value.to_str().ok().and_then(|text| text.parse().ok()).map(Some).ok_or(())
}

/// `Err`: the stream was already taken.
fn write(
    table: &mut ResourceTable,
    body: &Resource<HostOutgoingBody>,
) -> wasmtime::Result<Result<Resource<DynOutputStream>, ()>> {
    let shared = &table.get(&ours(body))?.0;
    if std::mem::replace(&mut shared.lock().stream, Stream::Open) != Stream::Untaken {
        return Ok(Err(()));
    }
    let stream: DynOutputStream = Box::new(Writer(shared.clone()));
    Ok(Ok(table.push(stream)?))
}

/// Takes the guest's end out of the table. The guest has to drop its stream, a child resource, before that; the table
/// could enforce this, but would allocate for it.
fn close(table: &mut ResourceTable, body: &Resource<HostOutgoingBody>) -> wasmtime::Result<GuestEnd> {
    if table.get(&ours(body))?.0.lock().stream == Stream::Open {
        return Err(ResourceTableError::HasChildren.into());
    }
    Ok(table.delete(ours(body))?)
}

fn finish(
    table: &mut ResourceTable,
    body: &Resource<HostOutgoingBody>,
    trailers: Option<Resource<FieldMap>>,
) -> wasmtime::Result<Result<(), ErrorCode>> {
    let body = close(table, body)?;
    let trailers = trailers.map(|trailers| table.delete(trailers)).transpose()?;
    let mut pipe = body.0.lock();
    if pipe.announced.is_some_and(|announced| announced != pipe.written) {
        let written = pipe.written;
        pipe.end(End::Broken);
        return Ok(Err(ErrorCode::HttpResponseBodySize(Some(written))));
    }
    pipe.end(End::Whole(trailers.map(|trailers| Box::new(trailers.into()))));
    Ok(Ok(()))
}

impl Drop for GuestEnd {
    fn drop(&mut self) {
        self.0.lock().end(End::Whole(None));
    }
}

#[derive(Clone)]
struct HostContext(Arc<Mutex<Pipe>>);

impl std::ops::Deref for HostContext {
    type Target = Mutex<Pipe>;

    fn deref(&self) -> &Mutex<Pipe> {
        &self.0
    }
}

impl HostContext {
    fn new(announced: Option<u64>) -> Self {
        Self(Arc::new(Mutex::new(Pipe { announced, ..Pipe::default() })))
    }
}

#[derive(Default)]
struct Pipe {
    /// Most bodies are one piece, which needs no allocation of the queue.
    first: Option<Bytes>,
    /// The data after `first`; empty when `first` is `None`.
    more: VecDeque<Bytes>,
    /// Unread bytes in `first` and `more`.
    ahead: usize,
    /// The `content-length`.
    announced: Option<u64>,
    written: u64,
    stream: Stream,
    end: Option<End>,
    reader_gone: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// The state of the guest's output stream, of which there is at most one.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stream {
    #[default]
    Untaken,
    Open,
    Dropped,
}

enum End {
    Whole(Option<Box<HeaderMap>>),
    Broken,
}

impl Pipe {
    /// Bytes that may be written now.
    fn room(&self) -> usize {
        AHEAD_BYTES_MAX.saturating_sub(self.ahead)
    }

    fn push(&mut self, bytes: Bytes) {
        self.ahead += bytes.len();
        self.written += bytes.len() as u64;
        match self.first {
            None => self.first = Some(bytes),
            Some(_) => self.more.push_back(bytes),
        }
        wake(&mut self.reader);
    }

    fn pop(&mut self) -> Option<Bytes> {
        let bytes = self.first.take()?;
        self.first = self.more.pop_front();
        self.ahead -= bytes.len();
        wake(&mut self.writer);
        Some(bytes)
    }

    /// Sets the end; later calls have no effect.
    fn end(&mut self, end: End) {
        if self.end.is_none() {
            self.end = Some(end);
            wake(&mut self.reader);
        }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

/// The guest's output stream.
struct Writer(HostContext);

#[async_trait::async_trait]
impl OutputStream for Writer {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        let mut pipe = self.0.lock();
        if pipe.reader_gone {
            return Err(StreamError::Closed);
        }
        if bytes.len() > pipe.room() {
            return Err(StreamError::trap("write exceeded budget"));
        }
        if !bytes.is_empty() {
            pipe.push(bytes);
        }
        if pipe.announced.is_some_and(|announced| pipe.written > announced) {
            let error = ErrorCode::HttpResponseBodySize(Some(pipe.written));
            return Err(StreamError::LastOperationFailed(error.into()));
        }
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        match self.0.lock().reader_gone {
            true => Err(StreamError::Closed),
            false => Ok(()),
        }
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        let pipe = self.0.lock();
        match pipe.reader_gone {
            true => Err(StreamError::Closed),
            false => Ok(pipe.room()),
        }
    }

    /// Like the default implementation, but without a heap-allocated future for each step, of which there is usually
    /// one.
    async fn blocking_write_and_flush(&mut self, mut bytes: Bytes) -> StreamResult<()> {
        loop {
            let room = self.check_write()?;
            if room > 0 {
                let piece = bytes.split_to(bytes.len().min(room));
                self.write(piece)?;
                if bytes.is_empty() {
                    return Ok(());
                }
            }
            self.ready().await;
        }
    }
}

#[async_trait::async_trait]
impl Pollable for Writer {
    async fn ready(&mut self) {
        poll_fn(|cx| {
            let mut pipe = self.0.lock();
            if pipe.reader_gone || pipe.room() > 0 {
                return Poll::Ready(());
            }
            pipe.writer = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.lock().stream = Stream::Dropped;
    }
}

/// The reader's end, as the response's body.
struct Reader(HostContext);

impl Body for Reader {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut pipe = self.0.lock();
        if let Some(bytes) = pipe.pop() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        match &mut pipe.end {
            None => {
                pipe.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(End::Whole(trailers)) => Poll::Ready(trailers.take().map(|map| Ok(Frame::trailers(*map)))),
            Some(End::Broken) => {
                pipe.end = Some(End::Whole(None));
                Poll::Ready(Some(Err(Error::HttpProtocolError)))
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut pipe = self.0.lock();
        pipe.reader_gone = true;
        (pipe.first, pipe.more, pipe.ahead) = (None, VecDeque::new(), 0);
        wake(&mut pipe.writer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{self, AsyncModel};

    fn pipe(announced: Option<u64>) -> (GuestEnd, Writer, Reader) {
        let shared = HostContext::new(announced);
        (GuestEnd(shared.clone()), Writer(shared.clone()), Reader(shared))
    }

    /// Reads the available data as text: `.` for trailers, `!` for an error, `$` for the end, `…` if nothing is
    /// available.
    fn read(reader: &mut Reader) -> String {
        let mut cx = Context::from_waker(Waker::noop());
        match Pin::new(reader).poll_frame(&mut cx) {
            Poll::Pending => "…".into(),
            Poll::Ready(None) => "$".into(),
            Poll::Ready(Some(Err(_))) => "!".into(),
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => String::from_utf8(data.to_vec()).unwrap(),
                Err(_) => ".".into(),
            },
        }
    }

    #[test]
    fn pieces_come_in_order_and_then_the_end() {
        let (guest, mut writer, mut reader) = pipe(None);
        assert_eq!(read(&mut reader), "…");
        for piece in ["a", "", "b", "c"] {
            writer.write(piece.into()).unwrap();
        }
        assert_eq!(read(&mut reader) + &read(&mut reader), "ab");
        writer.write("d".into()).unwrap();
        guest.0.lock().end(End::Whole(Some(Box::default())));
        drop(guest);
        let rest: Vec<_> = (0..4).map(|_| read(&mut reader)).collect();
        assert_eq!(rest, ["c", "d", ".", "$"]);
    }

    #[test]
    fn a_guest_gets_no_further_ahead_than_the_bound() {
        let (_guest, mut writer, mut reader) = pipe(None);
        let mut cx = Context::from_waker(Waker::noop());
        writer.write(vec![b'x'; AHEAD_BYTES_MAX].into()).unwrap();
        assert!(matches!(writer.check_write(), Ok(0)));
        assert!(matches!(writer.write("y".into()), Err(StreamError::Trap(_))));
        let mut writing = writer.blocking_write_and_flush("yz".into());
        assert!(writing.as_mut().poll(&mut cx).is_pending());
        assert_eq!(read(&mut reader).len(), AHEAD_BYTES_MAX);
        assert!(matches!(writing.as_mut().poll(&mut cx), Poll::Ready(Ok(()))));
        drop(writing);
        assert_eq!(read(&mut reader), "yz");
        drop(reader);
        assert!(matches!(writer.check_write(), Err(StreamError::Closed)));
        assert!(matches!(writer.write("y".into()), Err(StreamError::Closed)));
    }

    #[test]
    fn a_broken_body_is_an_error_and_a_dropped_one_ends() {
        let (guest, mut writer, mut reader) = pipe(Some(2));
        writer.write("ab".into()).unwrap();
        assert!(matches!(writer.write("c".into()), Err(StreamError::LastOperationFailed(_))));
        guest.0.lock().end(End::Broken);
        let all: Vec<_> = (0..4).map(|_| read(&mut reader)).collect();
        assert_eq!(all, ["ab", "c", "!", "$"]);
        let (guest, mut writer, mut reader) = pipe(None);
        writer.write("a".into()).unwrap();
        drop((guest, writer));
        assert_eq!(read(&mut reader) + &read(&mut reader), "a$");
    }

    #[test]
    fn lengths_are_what_their_header_says() {
        let announced = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_LENGTH, http::HeaderValue::from_static(value));
            }
            super::announced(&headers)
        };
        assert_eq!((announced(&[]), announced(&["12"])), (Ok(None), Ok(Some(12))));
        for wrong in [&[""][..], &["+1"], &["1", "1"], &["1 "], &["99999999999999999999"]] {
            assert_eq!(announced(wrong), Err(()), "{wrong:?}");
        }
    }

    /// Functions under another name would be linked beside wasmtime-wasi-http's, unused.
    #[test]
    fn the_functions_replaced_are_those_of_the_interface_that_is_linked() {
        let engine = wasmtime::Engine::new(&engine::settings(AsyncModel::Sync, 1 << 32)).unwrap();
        let mut linker = crate::capability::linker(&engine, AsyncModel::Sync).unwrap();
        let mut types = linker.instance(TYPES).unwrap();
        assert!(types.func_wrap("[constructor]fields", |_, (): ()| Ok(())).is_err());
    }
}
