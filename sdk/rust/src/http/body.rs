use std::fmt;
use std::future::Future;
use std::pin::Pin;

use serde::de::DeserializeOwned;
use wasip2::http::types::{IncomingBody, OutgoingBody};
use wasip2::io::streams::{InputStream, OutputStream, StreamError};

use super::{HttpError, HttpErrorKind};
use crate::executor::ready;

/// The maximum number of bytes that [`Body::bytes`] and similar functions read. Larger bodies are read in chunks, or
/// with another limit by [`Body::bytes_up_to`].
pub const BODY_BYTES_MAX: usize = 16 << 20;

/// The number of bytes requested by one read or splice.
const CHUNK_BYTES_MAX: u64 = 64 << 10;

/// The maximum number of bytes of one `blocking-write-and-flush`, by its definition.
const BLOCKING_WRITE_BYTES_MAX: usize = 4096;

/// The body of a request or a response: nothing, bytes, or a stream.
pub struct Body(pub(crate) Content);

pub(crate) enum Content {
    Bytes(Vec<u8>),
    Incoming(Incoming),
    Written(Write),
}

type Write = Box<dyn FnOnce(BodyWriter) -> WriteFuture>;
type WriteFuture = Pin<Box<dyn Future<Output = Result<BodyWriter, crate::Error>>>>;

impl Body {
    /// No body.
    pub fn empty() -> Self {
        Body(Content::Bytes(Vec::new()))
    }

    /// A body that is written in chunks while it is being sent. The closure runs after the handler has returned and the
    /// head has been sent. An error aborts the response, so that its reader detects it.
    ///
    /// ```
    /// # use mayfly::http::Body;
    /// let body = Body::stream(async |out| {
    ///     for n in 0..3 {
    ///         out.write(format!("{n}\n")).await?;
    ///     }
    ///     Ok(())
    /// });
    /// # assert_eq!(mayfly::block_on(body.text()).unwrap(), "0\n1\n2\n");
    /// ```
    pub fn stream<F>(write: F) -> Self
    where
        F: AsyncFnOnce(&mut BodyWriter) -> Result<(), crate::Error> + 'static,
    {
        Body(Content::Written(Box::new(|mut writer| {
            Box::pin(async move {
                write(&mut writer).await?;
                Ok(writer)
            })
        })))
    }

    /// The next chunk, or `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, HttpError> {
        match &mut self.0 {
            Content::Bytes(bytes) if bytes.is_empty() => Ok(None),
            Content::Bytes(bytes) => Ok(Some(std::mem::take(bytes))),
            Content::Incoming(incoming) => incoming.chunk().await,
            Content::Written(_) => {
                let written = std::mem::replace(&mut self.0, Content::Bytes(Vec::new()));
                self.0 = Content::Bytes(collect(written).await?);
                Box::pin(self.chunk()).await
            }
        }
    }

    /// The whole body, up to [`BODY_BYTES_MAX`].
    pub async fn bytes(self) -> Result<Vec<u8>, HttpError> {
        self.bytes_up_to(BODY_BYTES_MAX).await
    }

    /// The whole body, up to `bytes_max` bytes.
    pub async fn bytes_up_to(mut self, bytes_max: usize) -> Result<Vec<u8>, HttpError> {
        let mut whole = self.chunk().await?.unwrap_or_default();
        while whole.len() <= bytes_max {
            match self.chunk().await? {
                None => return Ok(whole),
                Some(chunk) => whole.extend_from_slice(&chunk),
            }
        }
        Err(HttpError::new(HttpErrorKind::TooLarge, format!("the body is larger than {bytes_max} bytes")))
    }

    /// The whole body as text.
    pub async fn text(self) -> Result<String, HttpError> {
        String::from_utf8(self.bytes().await?)
            .map_err(|_| HttpError::new(HttpErrorKind::InvalidBody, "the body is not UTF-8 text"))
    }

    /// The whole body, parsed as JSON.
    pub async fn json<T: DeserializeOwned>(self) -> Result<T, HttpError> {
        serde_json::from_slice(&self.bytes().await?).map_err(|error| {
            HttpError::new(HttpErrorKind::InvalidBody, format!("the body is not the JSON expected: {error}"))
        })
    }

    /// The length, if it is known before sending.
    pub(crate) fn known_len(&self) -> Option<usize> {
        match &self.0 {
            Content::Bytes(bytes) => Some(bytes.len()),
            Content::Incoming(_) | Content::Written(_) => None,
        }
    }

    /// Sends the whole body and ends the message. On failure the message stays unfinished, and the host aborts it.
    pub(crate) async fn send(self, body: OutgoingBody) -> Result<(), crate::Error> {
        let stream = body.write().expect("the stream of a body is taken once");
        let mut writer = BodyWriter(Sink::Wasi(stream));
        match self.0 {
            // The common case: one call to the host.
            Content::Bytes(bytes) if bytes.len() <= BLOCKING_WRITE_BYTES_MAX => {
                writer.write_blocking(&bytes)?
            }
            Content::Bytes(bytes) => {
                writer.write(bytes).await?;
                writer.flush().await?;
            }
            Content::Incoming(incoming) => {
                writer.splice(incoming).await?;
                writer.flush().await?;
            }
            Content::Written(write) => {
                writer = write(writer).await?;
                writer.flush().await?;
            }
        }
        drop(writer); // a child of the body, which cannot end before it
        OutgoingBody::finish(body, None).map_err(|code| HttpError::from_code(&code))?;
        Ok(())
    }
}

/// Collects a streamed body in memory, for tests on the host.
async fn collect(content: Content) -> Result<Vec<u8>, HttpError> {
    let Content::Written(write) = content else { return Ok(Vec::new()) };
    match write(BodyWriter(Sink::Memory(Vec::new()))).await {
        Ok(BodyWriter(Sink::Memory(bytes))) => Ok(bytes),
        Ok(_) => unreachable!("a writer keeps its sink"),
        Err(error) => Err(HttpError::new(HttpErrorKind::Protocol, error.to_string())),
    }
}

impl Default for Body {
    fn default() -> Self {
        Body::empty()
    }
}

impl From<Vec<u8>> for Body {
    fn from(bytes: Vec<u8>) -> Self {
        Body(Content::Bytes(bytes))
    }
}

impl From<&[u8]> for Body {
    fn from(bytes: &[u8]) -> Self {
        Body(Content::Bytes(bytes.to_vec()))
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        Body(Content::Bytes(text.into_bytes()))
    }
}

impl From<&str> for Body {
    fn from(text: &str) -> Self {
        Body(Content::Bytes(text.as_bytes().to_vec()))
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Content::Bytes(bytes) => write!(f, "Body({} bytes)", bytes.len()),
            Content::Incoming(_) | Content::Written(_) => f.write_str("Body(stream)"),
        }
    }
}

/// An incoming body. Fields drop in order: the stream before the body that it belongs to.
pub(crate) struct Incoming {
    stream: InputStream,
    _body: IncomingBody,
}

impl Incoming {
    pub(crate) fn new(body: IncomingBody) -> Self {
        let stream = body.stream().expect("the stream of a body is taken once");
        Incoming { stream, _body: body }
    }

    async fn chunk(&mut self) -> Result<Option<Vec<u8>>, HttpError> {
        loop {
            match self.stream.read(CHUNK_BYTES_MAX) {
                Ok(chunk) if chunk.is_empty() => ready(self.stream.subscribe()).await,
                Ok(chunk) => return Ok(Some(chunk)),
                Err(StreamError::Closed) => return Ok(None),
                Err(error) => return Err(HttpError::from_stream(&error)),
            }
        }
    }
}

/// Writes a streamed body.
pub struct BodyWriter(Sink);

enum Sink {
    Wasi(OutputStream),
    Memory(Vec<u8>),
}

impl BodyWriter {
    /// Sends bytes as fast as the reader accepts them. Fails with [`HttpErrorKind::Closed`] if the reader has closed
    /// the body.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) -> Result<(), HttpError> {
        let stream = match &mut self.0 {
            Sink::Wasi(stream) => stream,
            Sink::Memory(memory) => {
                memory.extend_from_slice(bytes.as_ref());
                return Ok(());
            }
        };
        let mut rest = bytes.as_ref();
        while !rest.is_empty() {
            let allowed = stream.check_write().map_err(|error| HttpError::from_stream(&error))?;
            if allowed == 0 {
                ready(stream.subscribe()).await;
                continue;
            }
            let count = rest.len().min(usize::try_from(allowed).unwrap_or(usize::MAX));
            stream.write(&rest[..count]).map_err(|error| HttpError::from_stream(&error))?;
            rest = &rest[count..];
        }
        Ok(())
    }

    fn write_blocking(&mut self, bytes: &[u8]) -> Result<(), HttpError> {
        match &mut self.0 {
            Sink::Wasi(stream) => {
                stream.blocking_write_and_flush(bytes).map_err(|e| HttpError::from_stream(&e))
            }
            Sink::Memory(memory) => {
                memory.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Forwards a whole body within the host: its bytes are not copied into the function.
    async fn splice(&mut self, incoming: Incoming) -> Result<(), HttpError> {
        let Sink::Wasi(stream) = &self.0 else { unreachable!("only sent to the host") };
        loop {
            match stream.splice(&incoming.stream, CHUNK_BYTES_MAX) {
                Ok(0) => {
                    ready(incoming.stream.subscribe()).await;
                    ready(stream.subscribe()).await;
                }
                Ok(_) => {}
                Err(StreamError::Closed) => return Ok(()),
                Err(error) => return Err(HttpError::from_stream(&error)),
            }
        }
    }

    async fn flush(&mut self) -> Result<(), HttpError> {
        let Sink::Wasi(stream) = &self.0 else { return Ok(()) };
        match stream.flush() {
            Ok(()) => {}
            // The reader has closed the stream: nothing is left to write.
            Err(StreamError::Closed) => return Ok(()),
            Err(error) => return Err(HttpError::from_stream(&error)),
        }
        ready(stream.subscribe()).await;
        match stream.check_write() {
            Ok(_) | Err(StreamError::Closed) => Ok(()),
            Err(error) => Err(HttpError::from_stream(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_on;

    #[test]
    fn bodies_read_whole_or_in_chunks() {
        let mut body = Body::from("abc");
        assert_eq!(block_on(body.chunk()).unwrap().as_deref(), Some(b"abc".as_slice()));
        assert_eq!(block_on(body.chunk()).unwrap(), None);
        assert_eq!(block_on(Body::empty().bytes()).unwrap(), b"");
    }

    #[test]
    fn a_body_past_the_limit_is_refused() {
        assert_eq!(block_on(Body::from("abc").bytes_up_to(3)).unwrap(), b"abc");
        let error = block_on(Body::from("abcd").bytes_up_to(3)).unwrap_err();
        assert_eq!(error.kind(), HttpErrorKind::TooLarge);
    }

    #[test]
    fn json_errors_say_where() {
        let error = block_on(Body::from("{\"a\":").json::<serde_json::Value>()).unwrap_err();
        assert_eq!(error.kind(), HttpErrorKind::InvalidBody);
        assert!(error.to_string().contains("line 1 column 5"), "{error}");
    }

    #[test]
    fn an_error_while_writing_is_an_error_of_the_reader() {
        let body = Body::stream(async |out| {
            out.write("half").await?;
            Err(crate::Error::new("Broken", "no more"))
        });
        assert!(block_on(body.text()).unwrap_err().to_string().contains("Broken"));
    }
}
