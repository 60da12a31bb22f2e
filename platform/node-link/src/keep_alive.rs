//! TCP keep-alive: the end of a machine is noticed on a connection that carries nothing (a terminal, for example).

use std::{io, time::Duration};

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// The time without traffic before the first probe, the interval of probes, and the number of unanswered probes that
/// end a connection.
const IDLE: Duration = Duration::from_secs(15);
const INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// Sets the options of a socket to an agent.
pub(crate) fn set(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    Ok(())
}
