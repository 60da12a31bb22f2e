//! The networks from which cluster IPs come.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// A network from which cluster IPs come, such as `10.96.0.0/16` or `fd00:10:96::/112`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceNetwork {
    family: IpFamily,
    base: u128,
    bits: u8,
}

/// The families of addresses, as `spec.ipFamilies` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    pub(crate) fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "IPv4" => Some(Self::V4),
            "IPv6" => Some(Self::V6),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::V4 => Self::V6,
            Self::V6 => Self::V4,
        }
    }

    fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

impl ServiceNetwork {
    /// `10.96.0.0/16`, as kubeadm sets it.
    pub const DEFAULT: Self =
        Self { family: IpFamily::V4, base: u32::from_be_bytes([10, 96, 0, 0]) as u128, bits: 16 };

    pub(crate) fn family(self) -> IpFamily {
        self.family
    }

    /// The number of addresses, with that of the network and the last one.
    pub(super) fn size(self) -> u128 {
        1u128.checked_shl(u32::from(self.family.bits() - self.bits)).unwrap_or(0)
    }

    pub(super) fn contains(self, ip: IpAddr) -> bool {
        let number = match ip {
            IpAddr::V4(ip) => u128::from(u32::from(ip)),
            IpAddr::V6(ip) => u128::from(ip),
        };
        let offset = number.wrapping_sub(self.base);
        IpFamily::of(ip) == self.family && offset > 0 && offset < self.size() - 1
    }

    /// The address with this number in the network.
    pub(super) fn at(self, offset: u128) -> IpAddr {
        let number = self.base + offset;
        match self.family {
            IpFamily::V4 => Ipv4Addr::from(u32::try_from(number).unwrap_or(u32::MAX)).into(),
            IpFamily::V6 => Ipv6Addr::from(number).into(),
        }
    }

    /// The address of the Service `kubernetes`: the first.
    pub fn first(self) -> IpAddr {
        self.at(1)
    }
}

impl fmt::Display for ServiceNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.at(0), self.bits)
    }
}

/// The reason why a text is not a network for Services.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is neither an IPv4 network of 8 to 28 bits, such as 10.96.0.0/16, nor an IPv6 network of 64 to 120 bits, such \
     as fd00:10:96::/112"
)]
pub struct InvalidNetwork(String);

impl FromStr for ServiceNetwork {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let parse = || {
            let (ip, bits) = text.split_once('/')?;
            let (ip, bits) = (ip.parse::<IpAddr>().ok()?, bits.parse::<u8>().ok()?);
            let (base, range) = match ip {
                IpAddr::V4(ip) => (u128::from(u32::from(ip)), 8..=28),
                IpAddr::V6(ip) => (u128::from(ip), 64..=120),
            };
            let network = Self { family: IpFamily::of(ip), base, bits };
            (range.contains(&bits) && base.is_multiple_of(network.size())).then_some(network)
        };
        parse().ok_or_else(|| InvalidNetwork(text.to_owned()))
    }
}

/// The networks of a cluster: the first one's family is that of Services that ask for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceNetworks {
    pub primary: ServiceNetwork,
    /// The network of the other family, in a dual-stack cluster.
    pub secondary: Option<ServiceNetwork>,
}

impl ServiceNetworks {
    pub const DEFAULT: Self = Self { primary: ServiceNetwork::DEFAULT, secondary: None };

    pub(crate) fn of(self, family: IpFamily) -> Option<ServiceNetwork> {
        [Some(self.primary), self.secondary].into_iter().flatten().find(|network| network.family == family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks() {
        assert_eq!("10.96.0.0/16".parse(), Ok(ServiceNetwork::DEFAULT));
        let first = |text: &str| text.parse::<ServiceNetwork>().unwrap().first().to_string();
        assert_eq!(first("127.64.0.0/12"), "127.64.0.1");
        assert_eq!(first("fd00:10:96::/112"), "fd00:10:96::1");
        for bad in [
            "10.96.0.0",
            "10.96.0.1/16",
            "10.96.0.0/30",
            "::/48",
            "x/16",
            "fd00::1/112",
            "fd00::/121",
            "10.96.0.0/64",
        ] {
            assert!(bad.parse::<ServiceNetwork>().is_err(), "{bad}");
        }
        let network: ServiceNetwork = "fd00::/112".parse().unwrap();
        for (ip, expected) in
            [("fd00::", false), ("fd00::2", true), ("fd00::ffff", false), ("10.96.0.1", false)]
        {
            assert_eq!(network.contains(ip.parse().unwrap()), expected, "{ip}");
        }
    }
}
