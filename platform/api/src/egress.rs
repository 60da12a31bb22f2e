//! The outbound addresses that a function may call: the rules of `spec.egress`, parsed once.

use std::{fmt, net::IpAddr, str::FromStr};

/// One allowed destination: scheme, host (exact, `*.suffix`, or an address) and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressRule {
    scheme: Scheme,
    host: Host,
    port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    Http,
    Https,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Exact(String),
    /// Every name that ends with this, dot included.
    Suffix(String),
    Address(IpAddr),
}

/// The reason why a text is not an egress rule.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{text:?} is not an egress rule ({why}): write scheme://host or scheme://host:port, such as \
     https://api.example.com, https://*.example.com or http://10.0.0.5:8080"
)]
pub struct InvalidEgressRule {
    text: String,
    why: &'static str,
}

/// The result of checking a destination against a function's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressVerdict {
    /// No rule lists it.
    Denied,
    /// Listed by name: its addresses must be public ones.
    PublicAddressesOnly,
    /// The address itself (or `localhost`) is listed: any address is allowed.
    AnyAddress,
}

impl EgressRule {
    fn default_port(scheme: Scheme) -> u16 {
        match scheme {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }

    fn verdict(&self, scheme: Scheme, host: &str, port: u16) -> EgressVerdict {
        if scheme != self.scheme || port != self.port {
            return EgressVerdict::Denied;
        }
        match &self.host {
            Host::Exact(name) if name == host && name == "localhost" => EgressVerdict::AnyAddress,
            Host::Exact(name) if name == host => EgressVerdict::PublicAddressesOnly,
            Host::Suffix(suffix) if host.len() > suffix.len() && host.ends_with(suffix.as_str()) => {
                EgressVerdict::PublicAddressesOnly
            }
            Host::Address(address) if parse_address(host) == Some(*address) => EgressVerdict::AnyAddress,
            _ => EgressVerdict::Denied,
        }
    }
}

/// Checks a destination. `scheme` is `http` or `https`; `host` as in the URL (brackets around an IPv6 address are
/// allowed); `port` is the URL's or the scheme's own.
pub fn judge(rules: &[EgressRule], scheme: &str, host: &str, port: Option<u16>) -> EgressVerdict {
    let Ok(scheme) = scheme.parse::<Scheme>() else { return EgressVerdict::Denied };
    let port = port.unwrap_or(EgressRule::default_port(scheme));
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let mut best = EgressVerdict::Denied;
    for rule in rules {
        match rule.verdict(scheme, &host, port) {
            EgressVerdict::AnyAddress => return EgressVerdict::AnyAddress,
            EgressVerdict::PublicAddressesOnly => best = EgressVerdict::PublicAddressesOnly,
            EgressVerdict::Denied => {}
        }
    }
    best
}

/// Whether an address belongs to the public internet: not loopback, private, link-local, shared,
/// multicast, documentation, benchmarking or reserved (IANA's special-purpose registries), nor an IPv6
/// form that carries such an IPv4 address.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            !(v4.is_unspecified()
                || v4.is_loopback()
                || v4.is_private()
                || v4.is_link_local()
                || v4.is_multicast()
                || v4.is_broadcast()
                || v4.is_documentation()
                || a == 0
                || a >= 240
                || (a == 100 && (64..128).contains(&b))
                || (a == 198 && (b == 18 || b == 19))
                || (a == 192 && b == 0 && c == 0)
                // 6to4 relays, deprecated (RFC 7526).
                || (a == 192 && b == 88 && c == 99))
        }
        IpAddr::V6(v6) => {
            let segments = v6.segments();
            if let Some(v4) = v6.to_ipv4_mapped() {
                return is_public(IpAddr::V4(v4));
            }
            // NAT64 (64:ff9b::/96) and 6to4 (2002::/16) carry an IPv4 address.
            let carried = if segments[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
                Some([segments[6], segments[7]])
            } else if segments[0] == 0x2002 {
                Some([segments[1], segments[2]])
            } else {
                None
            };
            if let Some([high, low]) = carried {
                let bits = (u32::from(high) << 16) | u32::from(low);
                return is_public(IpAddr::V4(bits.into()));
            }
            !(v6.is_unspecified()
                || v6.is_loopback()
                || v6.is_multicast()
                || v6.is_unique_local()
                || v6.is_unicast_link_local()
                || (segments[0] == 0x2001 && segments[1] == 0xdb8)
                || segments[0] & 0xffc0 == 0xfec0
                // Documentation (RFC 9637), benchmarking, discard-only, segment routing.
                || (segments[0] == 0x3fff && segments[1] < 0x1000)
                || segments[..3] == [0x2001, 2, 0]
                || segments[..4] == [0x100, 0, 0, 0]
                || segments[0] == 0x5f00
                // NAT64 with a prefix that a network assigns itself (RFC 8215): only that network can tell the
                // addresses behind it.
                || segments[..3] == [0x64, 0xff9b, 1]
                || segments[..6] == [0; 6])
        }
    }
}

fn parse_address(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

impl FromStr for Scheme {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "http" => Ok(Self::Http),
            "https" => Ok(Self::Https),
            _ => Err(()),
        }
    }
}

impl FromStr for EgressRule {
    type Err = InvalidEgressRule;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = |why| InvalidEgressRule { text: text.chars().take(200).collect(), why };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("no scheme"))?;
        let scheme = scheme.parse().map_err(|()| invalid("the scheme is neither http nor https"))?;
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#', '@']) {
            return Err(invalid("it has more than a host and a port"));
        }
        let port_at = match authority.rfind(']') {
            Some(bracket) => authority[bracket..].find(':').map(|at| at + bracket),
            None => authority.rfind(':'),
        };
        let (host, port) = match port_at {
            Some(at) => {
                let port = authority[at + 1..].parse().map_err(|_| invalid("the port is not a number"))?;
                (&authority[..at], port)
            }
            None => (authority, Self::default_port(scheme)),
        };
        let host = host.to_ascii_lowercase();
        let host = if let Some(address) = parse_address(&host) {
            Host::Address(address)
        } else if let Some(suffix) = host.strip_prefix('*') {
            if !suffix.starts_with('.') || crate::names::dns_subdomain(&suffix[1..]).is_err() {
                return Err(invalid("a wildcard stands for whole labels in front: *.example.com"));
            }
            Host::Suffix(suffix.to_owned())
        } else if crate::names::dns_subdomain(&host).is_ok() {
            Host::Exact(host)
        } else {
            return Err(invalid("the host is neither a name nor an address"));
        };
        Ok(Self { scheme, host, port })
    }
}

impl fmt::Display for EgressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.scheme == Scheme::Http { "http" } else { "https" };
        match &self.host {
            Host::Exact(name) => write!(f, "{scheme}://{name}:{}", self.port),
            Host::Suffix(suffix) => write!(f, "{scheme}://*{suffix}:{}", self.port),
            Host::Address(IpAddr::V6(v6)) => write!(f, "{scheme}://[{v6}]:{}", self.port),
            Host::Address(v4) => write!(f, "{scheme}://{v4}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_verdicts() {
        let rules: Vec<EgressRule> =
            ["https://api.example.com", "https://*.example.org", "http://10.0.0.5:8080", "http://[::1]:81"]
                .iter()
                .map(|text| text.parse().unwrap())
                .collect();
        use EgressVerdict::{AnyAddress, Denied, PublicAddressesOnly};
        for (scheme, host, port, expected) in [
            ("https", "api.example.com", None, PublicAddressesOnly),
            ("https", "API.example.com.", Some(443), PublicAddressesOnly),
            ("http", "api.example.com", None, Denied),
            ("https", "api.example.com", Some(444), Denied),
            ("https", "a.b.example.org", None, PublicAddressesOnly),
            ("https", "example.org", None, Denied),
            ("https", "evilexample.org", None, Denied),
            ("http", "10.0.0.5", Some(8080), AnyAddress),
            ("http", "[::1]", Some(81), AnyAddress),
            ("ftp", "api.example.com", None, Denied),
        ] {
            assert_eq!(judge(&rules, scheme, host, port), expected, "{scheme}://{host}:{port:?}");
        }
        for bad in [
            "",
            "api.example.com",
            "ftp://x",
            "https://a/b",
            "https://*",
            "https://*x.y",
            "http://a:b",
            "http://u@h",
        ] {
            assert!(bad.parse::<EgressRule>().is_err(), "{bad}");
        }
    }

    #[test]
    fn private_ranges_in_every_disguise() {
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "::1",
            "fe80::1",
            "fd00::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "64:ff9b:1::808:808",
            "192.88.99.1",
            "2002:a00:1::",
            "::",
            "::7f00:1",
            "3fff:fff:1::1",
            "2001:2::1",
            "100::1",
            "5f00::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
        for public in [
            "1.1.1.1",
            "93.184.216.34",
            "2606:4700::1111",
            "::ffff:1.1.1.1",
            "3fff:1000::1",
            "2001:2:1::1",
            "100:0:0:1::1",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
    }
}
