//! What the kernel has for routes between nodes, and the execution of steps. Blocks, for the network namespace of the
//! calling thread.

use std::{fs, io, net::Ipv4Addr};

use ipnet::Ipv4Net;

use super::tunnel::MacAddress;
use crate::netlink::route::{self, RouteSocket};

const IP_FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";
/// No such process: the kernel's answer for a route that does not exist.
const ERROR_NO_ROUTE: i32 = 3;
const ERROR_NO_DEVICE: i32 = 19;
const ERROR_NO_ADDRESS: i32 = 99;

/// The parameters of a VXLAN device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VxlanDevice {
    /// The VXLAN network identifier (VNI).
    pub id: u32,
    /// The UDP port.
    pub port: u16,
    /// The source address of outer packets; `None`: the kernel chooses it.
    pub local: Option<Ipv4Addr>,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkLink {
    pub index: u32,
    pub name: String,
    pub mac: Option<MacAddress>,
    /// In bytes.
    pub mtu: u32,
    pub is_up: bool,
    pub vxlan: Option<VxlanDevice>,
}

/// An address of a link, with its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    pub link: u32,
    pub address: Ipv4Net,
}

/// A unicast route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRoute {
    pub destination: Ipv4Net,
    pub gateway: Option<Ipv4Addr>,
    pub link: u32,
    pub protocol: u8,
    pub priority: u32,
}

/// A permanent neighbour: the MAC of an address on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourEntry {
    pub link: u32,
    pub address: Ipv4Addr,
    pub mac: MacAddress,
}

/// An entry of a VXLAN device: the node behind a MAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardingEntry {
    pub link: u32,
    pub mac: MacAddress,
    pub to: Ipv4Addr,
}

/// What the kernel has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelState {
    pub links: Vec<NetworkLink>,
    pub addresses: Vec<LinkAddress>,
    pub routes: Vec<KernelRoute>,
    pub neighbours: Vec<NeighbourEntry>,
    pub forwarding: Vec<ForwardingEntry>,
    /// Whether the kernel forwards IPv4 packets.
    pub ip_forward: bool,
}

impl KernelState {
    /// Reads the state.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn read() -> io::Result<Self> {
        let mut state = route::read()?;
        state.ip_forward = fs::read_to_string(IP_FORWARD)?.trim() == "1";
        Ok(state)
    }
}

/// A change of the kernel's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverlayStep {
    /// Lets the kernel forward packets between links.
    EnableForwarding,
    CreateDevice {
        name: String,
        device: VxlanDevice,
        mac: MacAddress,
        /// In bytes.
        mtu: u32,
    },
    /// Brings a device up with this MTU, in bytes.
    SetDevice {
        link: u32,
        mtu: u32,
    },
    /// Deletes a device, with all its entries and routes.
    DeleteDevice {
        link: u32,
    },
    AddAddress(LinkAddress),
    DeleteAddress(LinkAddress),
    SetRoute(KernelRoute),
    DeleteRoute(KernelRoute),
    SetNeighbour(NeighbourEntry),
    DeleteNeighbour(NeighbourEntry),
    SetForwarding(ForwardingEntry),
    DeleteForwarding(ForwardingEntry),
}

/// Executes steps in order. A step that fails does not keep later ones from being executed; entries that are already
/// deleted are no failure. Returns the failed steps.
///
/// # Errors
/// The process has no netlink socket.
pub fn execute(steps: &[OverlayStep]) -> io::Result<Vec<(OverlayStep, io::Error)>> {
    let socket = RouteSocket::open()?;
    let mut failed = Vec::new();
    for step in steps {
        if let Err(error) = execute_step(&socket, step) {
            failed.push((step.clone(), error));
        }
    }
    Ok(failed)
}

fn execute_step(socket: &RouteSocket, step: &OverlayStep) -> io::Result<()> {
    match step {
        OverlayStep::EnableForwarding => fs::write(IP_FORWARD, "1"),
        OverlayStep::CreateDevice { name, device, mac, mtu } => {
            socket.create_vxlan(name, *device, *mac, *mtu)
        }
        OverlayStep::SetDevice { link, mtu } => socket.set_link(*link, *mtu),
        OverlayStep::DeleteDevice { link } => deleted(socket.delete_link(*link)),
        OverlayStep::AddAddress(of) => socket.add_address(*of),
        OverlayStep::DeleteAddress(of) => deleted(socket.delete_address(*of)),
        OverlayStep::SetRoute(route) => socket.set_route(route),
        OverlayStep::DeleteRoute(route) => deleted(socket.delete_route(route)),
        OverlayStep::SetNeighbour(of) => socket.set_neighbour(*of),
        OverlayStep::DeleteNeighbour(of) => deleted(socket.delete_neighbour(*of)),
        OverlayStep::SetForwarding(of) => socket.set_forwarding(*of),
        OverlayStep::DeleteForwarding(of) => deleted(socket.delete_forwarding(*of)),
    }
}

fn deleted(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || matches!(
                    error.raw_os_error(),
                    Some(ERROR_NO_ROUTE | ERROR_NO_DEVICE | ERROR_NO_ADDRESS)
                ) =>
        {
            Ok(())
        }
        result => result,
    }
}
