//! The connection of a request, as the request's handler sees it.

use std::{any::Any, net::IpAddr, sync::Arc};

use parking_lot::Mutex;

/// The client's connection: an extension of each of its requests. Clones are the same connection.
#[derive(Clone)]
pub struct ClientConnection {
    address: IpAddr,
    /// `None` after the connection is closed.
    held: Arc<Mutex<Option<Vec<Box<dyn Any + Send>>>>>,
}

impl std::fmt::Debug for ClientConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientConnection").field("address", &self.address).finish_non_exhaustive()
    }
}

impl ClientConnection {
    pub(crate) fn new(address: IpAddr) -> Self {
        Self { address, held: Arc::new(Mutex::new(Some(Vec::new()))) }
    }

    /// The IP address of the client, or of a proxy between the client and this port.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Keeps `value` until the connection is closed, which is the end of an upgraded request (WebSocket, SPDY): its
    /// stream is the whole connection. If the connection is closed already, `value` is dropped at once.
    pub fn hold(&self, value: impl Send + 'static) {
        if let Some(held) = self.held.lock().as_mut() {
            held.push(Box::new(value));
        }
    }

    /// Drops the held values.
    pub(crate) fn close(&self) {
        let held = self.held.lock().take();
        drop(held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_held_until_the_connection_is_closed() {
        let connection = ClientConnection::new([127, 0, 0, 1].into());
        let value = Arc::new(());
        connection.clone().hold(value.clone());
        assert_eq!(Arc::strong_count(&value), 2);
        connection.close();
        assert_eq!(Arc::strong_count(&value), 1);
        connection.hold(value.clone());
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
