//! Netlink sockets: the generation of the packet filter's rules, [`conntrack`] entries, and the [`route`] tables.
//!
//! Requests are synchronous and short; [`conntrack::delete_udp`] and [`route::read`] may list many entries and belong on
//! a thread for blocking work.

pub(crate) mod conntrack;
pub(crate) mod route;

use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, sockopt};

/// The timeout of one answer of the kernel, which normally answers at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Larger than any message of the kernel.
const BUFFER_BYTES: usize = 64 * 1024;
/// `struct nlmsghdr`: length, type, flags, sequence number, port.
const HEADER_BYTES: usize = 16;
/// `struct nfgenmsg`: address family, version, resource.
const FAMILY_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;

const REQUEST: u16 = 0x1;
const ACKNOWLEDGE: u16 = 0x4;
const LIST: u16 = 0x300;
const MESSAGE_ERROR: u16 = 2;
const MESSAGE_DONE: u16 = 3;

const SUBSYSTEM_NFTABLES: u16 = 10;
const GET_GENERATION: u16 = 16;
const ATTRIBUTE_GENERATION: u16 = 1;
/// The flags of an attribute's type: nested, and in network byte order.
const ATTRIBUTE_TYPE: u16 = 0x3fff;
const ATTRIBUTE_NESTED: u16 = 0x8000;

/// The number of the kernel's current rules: each transaction of any program increments it.
pub(crate) fn rules_generation() -> io::Result<u32> {
    let socket = NetfilterSocket::open()?;
    let mut generation = None;
    socket.request((SUBSYSTEM_NFTABLES << 8) | GET_GENERATION, ACKNOWLEDGE, 0, &[], |message| {
        let value = attributes(message).find(|(of, _)| *of == ATTRIBUTE_GENERATION);
        generation = value.and_then(|(_, value)| Some(u32::from_be_bytes(value.try_into().ok()?)));
    })?;
    generation.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// A socket of the netfilter subsystems, whose messages begin with a `struct nfgenmsg`.
pub(crate) struct NetfilterSocket(NetlinkSocket);

impl NetfilterSocket {
    pub(crate) fn open() -> io::Result<Self> {
        NetlinkSocket::open(Some(netlink::NETFILTER)).map(Self)
    }

    /// As [`NetlinkSocket::request`]; `take` gets the attributes of each message.
    fn request(
        &self,
        kind: u16,
        flags: u16,
        family: u8,
        attributes: &[u8],
        mut take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let body = [&[family, 0, 0, 0], attributes].concat();
        self.0.request(kind, flags, &body, |_, payload| {
            take(payload.get(FAMILY_HEADER_BYTES..).unwrap_or_default());
        })
    }
}

/// A socket of one netlink protocol, in the network namespace of the thread that opens it.
struct NetlinkSocket(OwnedFd);

impl NetlinkSocket {
    /// `None`: the protocol number zero, `NETLINK_ROUTE`.
    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self(socket))
    }

    /// Sends a request, and passes the type and the payload of each message of the answer to `take`. `flags` contains
    /// [`ACKNOWLEDGE`] or [`LIST`], which determine how the end of the answer is recognised.
    fn request(
        &self,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut take: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        let length = u32::try_from(HEADER_BYTES + body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut message = Vec::new();
        message.extend(length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend((flags | REQUEST).to_ne_bytes());
        message.extend([0; 8]);
        message.extend(body);
        rustix::net::send(&self.0, &message, SendFlags::empty())?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let (received, _) = match rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty()) {
                Err(rustix::io::Errno::INTR) => continue,
                received => received?,
            };
            let mut rest = buffer.get(..received).unwrap_or_default();
            while let Some((kind, payload, next)) = next_message(rest) {
                rest = next;
                match kind {
                    MESSAGE_DONE => return Ok(()),
                    MESSAGE_ERROR => {
                        let code = payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                        return if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-code)) };
                    }
                    kind => take(kind, payload),
                }
            }
        }
    }
}

/// The type and payload of the first message, and the messages after it.
fn next_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
    let kind = u16::from_ne_bytes([*bytes.get(4)?, *bytes.get(5)?]);
    let payload = bytes.get(HEADER_BYTES..length)?;
    Some((kind, payload, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// The types and values of attributes.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes([*bytes.get(2)?, *bytes.get(3)?]) & ATTRIBUTE_TYPE;
        let value = bytes.get(ATTRIBUTE_HEADER_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Encodes an attribute.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).unwrap_or(u16::MAX);
    let mut bytes = Vec::new();
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_written_and_cut_ones_end_the_list() {
        let mut bytes = attribute(1, b"abc");
        bytes.extend(attribute(2 | ATTRIBUTE_NESTED, &attribute(7, b"")));
        let read: Vec<_> = attributes(&bytes).collect();
        assert_eq!(read, [(1, &b"abc"[..]), (2, &[4, 0, 7, 0])]);
        for length in 0..bytes.len() {
            assert!(attributes(&bytes[..length]).count() < 2, "{length}");
        }
        assert_eq!(attributes(&[0, 0, 0, 0]).count(), 0, "a length of nothing");
    }
}
