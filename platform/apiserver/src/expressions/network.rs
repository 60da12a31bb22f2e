//! URLs, IP addresses and networks in expressions. (Source: `apiserver/pkg/cel/library/{urls,ip,cidr}.go`.)

use std::{net::IpAddr, sync::Arc};

use cel::{Env, ExecutionError, Value, common::types::STRING_TYPE, objects::Opaque};
use url::Url;

use super::libraries::{CelAnswer, any, declare, failed, integer, string, text};
use cel::common::types::DYN_TYPE;

#[derive(Debug, PartialEq, Eq)]
struct UrlValue(Url);

impl Opaque for UrlValue {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.URL"
    }
}

#[derive(Debug, PartialEq, Eq)]
struct IpValue(IpAddr);

impl Opaque for IpValue {
    fn runtime_type_name(&self) -> &str {
        "net.IP"
    }
}

/// A network: an address and the length of its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cidr {
    ip: IpAddr,
    bits: u8,
}

impl Opaque for Cidr {
    fn runtime_type_name(&self) -> &str {
        "net.CIDR"
    }
}

impl Cidr {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("network address parse error during conversion from string: {text:?}");
        let (ip, bits) = text.split_once('/').ok_or_else(wrong)?;
        let (ip, bits): (IpAddr, u8) = (address(ip)?, bits.parse().map_err(|_| wrong())?);
        if bits > width(ip) { Err(wrong()) } else { Ok(Self { ip, bits }) }
    }

    fn masked(self) -> Self {
        let kept = u128::from(self.bits);
        let ip = match self.ip {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits)).unwrap_or(0);
                IpAddr::V4((u32::from(ip) & mask).into())
            }
            IpAddr::V6(ip) => {
                let shift = u32::try_from(128 - kept).unwrap_or(0);
                IpAddr::V6((u128::from(ip) & u128::MAX.checked_shl(shift).unwrap_or(0)).into())
            }
        };
        Self { ip, ..self }
    }

    fn contains(self, ip: IpAddr) -> bool {
        width(ip) == width(self.ip) && Self { ip, ..self }.masked().ip == self.masked().ip
    }

    fn contains_network(self, other: Self) -> bool {
        other.bits >= self.bits && self.contains(other.ip)
    }
}

fn width(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// An address. IPv4 addresses in IPv6, zones and leading zeros are refused, as upstream.
fn address(text: &str) -> Result<IpAddr, String> {
    let parsed: IpAddr = text.parse().map_err(|_| {
        format!("IP Address {text:?} parse error during conversion from string: invalid address")
    })?;
    match parsed {
        IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some() => {
            Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"))
        }
        ip => Ok(ip),
    }
}

fn opaque(value: impl Opaque) -> Value {
    Value::Opaque(Arc::new(value))
}

fn own<T: Opaque>(values: &[Value], at: usize) -> Result<&T, ExecutionError> {
    let found = match values.get(at) {
        Some(Value::Opaque(value)) => value.downcast_ref::<T>(),
        _ => None,
    };
    found.ok_or_else(ExecutionError::missing_argument_or_target)
}

pub(super) fn extension(env: &mut Env) -> Result<(), cel::DeclarationError> {
    let one_text = || vec![STRING_TYPE];
    declare!(env, global "url", "string_to_url", one_text(), url)?;
    declare!(env, global "isURL", "is_url", one_text(), is_url)?;
    declare!(env, member "getScheme", "url_get_scheme", DYN_TYPE, any(0), scheme)?;
    declare!(env, member "getHost", "url_get_host", DYN_TYPE, any(0), host)?;
    declare!(env, member "getHostname", "url_get_hostname", DYN_TYPE, any(0), hostname)?;
    declare!(env, member "getPort", "url_get_port", DYN_TYPE, any(0), port)?;
    declare!(env, member "getEscapedPath", "url_get_escaped_path", DYN_TYPE, any(0), escaped_path)?;
    declare!(env, member "getQuery", "url_get_query", DYN_TYPE, any(0), query)?;
    declare!(env, global "ip", "string_to_ip", one_text(), ip)?;
    declare!(env, global "isIP", "is_ip", one_text(), is_ip)?;
    declare!(env, global "ip.isCanonical", "ip_is_canonical", one_text(), is_canonical)?;
    declare!(env, member "family", "ip_family", DYN_TYPE, any(0), family)?;
    declare!(env, member "isUnspecified", "ip_is_unspecified", DYN_TYPE, any(0), is_unspecified)?;
    declare!(env, member "isLoopback", "ip_is_loopback", DYN_TYPE, any(0), is_loopback)?;
    declare!(env, member "isLinkLocalMulticast", "ip_is_llm", DYN_TYPE, any(0), is_link_local_multicast)?;
    declare!(env, member "isLinkLocalUnicast", "ip_is_llu", DYN_TYPE, any(0), is_link_local_unicast)?;
    declare!(env, member "isGlobalUnicast", "ip_is_gu", DYN_TYPE, any(0), is_global_unicast)?;
    declare!(env, global "cidr", "string_to_cidr", one_text(), cidr)?;
    declare!(env, global "isCIDR", "is_cidr", one_text(), is_cidr)?;
    declare!(env, member "containsIP", "cidr_contains_ip", DYN_TYPE, any(1), contains_ip)?;
    declare!(env, member "containsCIDR", "cidr_contains_cidr", DYN_TYPE, any(1), contains_cidr)?;
    declare!(env, member "ip", "cidr_ip", DYN_TYPE, any(0), network_ip)?;
    declare!(env, member "masked", "cidr_masked", DYN_TYPE, any(0), masked)?;
    declare!(env, member "prefixLength", "cidr_prefix_length", DYN_TYPE, any(0), prefix_length)?;
    declare!(env, global "string", "network_to_string", any(1), shown)
}

/// A URL with a scheme and a host, or an absolute path.
fn parse_url(text: &str) -> Result<Url, String> {
    let wrong = |why: String| format!("URL parse error during conversion from string: {why}");
    if text.starts_with('/') {
        // Upstream takes request URIs, too.
        let base = Url::parse("path:/").map_err(|error| wrong(error.to_string()))?;
        return base.join(text).map_err(|error| wrong(error.to_string()));
    }
    Url::parse(text).map_err(|error| wrong(error.to_string()))
}

fn url(values: &[Value]) -> CelAnswer {
    parse_url(text(values, 0)?).map(|url| opaque(UrlValue(url))).map_err(|why| failed("url", why))
}

fn is_url(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(parse_url(text(values, 0)?).is_ok()))
}

fn scheme(values: &[Value]) -> CelAnswer {
    let scheme = own::<UrlValue>(values, 0)?.0.scheme();
    Ok(string(if scheme == "path" { "" } else { scheme }))
}

fn host(values: &[Value]) -> CelAnswer {
    let url = &own::<UrlValue>(values, 0)?.0;
    let host = url.host_str().unwrap_or("");
    Ok(string(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))))
}

fn hostname(values: &[Value]) -> CelAnswer {
    let host = own::<UrlValue>(values, 0)?.0.host_str().unwrap_or("");
    Ok(string(host.trim_matches(['[', ']'])))
}

fn port(values: &[Value]) -> CelAnswer {
    let port = own::<UrlValue>(values, 0)?.0.port();
    Ok(string(port.map(|port| port.to_string()).unwrap_or_default()))
}

fn escaped_path(values: &[Value]) -> CelAnswer {
    Ok(string(own::<UrlValue>(values, 0)?.0.path()))
}

fn query(values: &[Value]) -> CelAnswer {
    let mut query: std::collections::HashMap<String, Vec<Value>> = std::collections::HashMap::new();
    for (name, value) in own::<UrlValue>(values, 0)?.0.query_pairs() {
        query.entry(name.into_owned()).or_default().push(string(value));
    }
    let lists = query.into_iter().map(|(name, list)| (name, Value::List(Arc::new(list))));
    Ok(lists.collect::<std::collections::HashMap<String, Value>>().into())
}

fn ip(values: &[Value]) -> CelAnswer {
    address(text(values, 0)?).map(|ip| opaque(IpValue(ip))).map_err(|why| failed("ip", why))
}

fn is_ip(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(address(text(values, 0)?).is_ok()))
}

fn is_canonical(values: &[Value]) -> CelAnswer {
    let given = text(values, 0)?;
    let ip = address(given).map_err(|why| failed("ip.isCanonical", why))?;
    Ok(Value::Bool(ip.to_string() == given))
}

fn family(values: &[Value]) -> CelAnswer {
    Ok(Value::Int(if own::<IpValue>(values, 0)?.0.is_ipv4() { 4 } else { 6 }))
}

fn is_unspecified(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(own::<IpValue>(values, 0)?.0.is_unspecified()))
}

fn is_loopback(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(own::<IpValue>(values, 0)?.0.is_loopback()))
}

fn link_local_multicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.octets()[..3] == [224, 0, 0],
        IpAddr::V6(ip) => ip.segments()[0] & 0xff0f == 0xff02,
    }
}

fn link_local_unicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn is_link_local_multicast(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(link_local_multicast(own::<IpValue>(values, 0)?.0)))
}

fn is_link_local_unicast(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(link_local_unicast(own::<IpValue>(values, 0)?.0)))
}

fn is_global_unicast(values: &[Value]) -> CelAnswer {
    let ip = own::<IpValue>(values, 0)?.0;
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    let is_special = ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || link_local_unicast(ip);
    Ok(Value::Bool(!is_broadcast && !is_special))
}

fn cidr(values: &[Value]) -> CelAnswer {
    Cidr::parse(text(values, 0)?).map(opaque).map_err(|why| failed("cidr", why))
}

fn is_cidr(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(Cidr::parse(text(values, 0)?).is_ok()))
}

fn contains_ip(values: &[Value]) -> CelAnswer {
    let ip = match &values[1] {
        Value::String(text) => address(text).map_err(|why| failed("containsIP", why))?,
        _ => own::<IpValue>(values, 1)?.0,
    };
    Ok(Value::Bool(own::<Cidr>(values, 0)?.contains(ip)))
}

fn contains_cidr(values: &[Value]) -> CelAnswer {
    let other = match &values[1] {
        Value::String(text) => Cidr::parse(text).map_err(|why| failed("containsCIDR", why))?,
        _ => *own::<Cidr>(values, 1)?,
    };
    Ok(Value::Bool(own::<Cidr>(values, 0)?.contains_network(other)))
}

fn network_ip(values: &[Value]) -> CelAnswer {
    Ok(opaque(IpValue(own::<Cidr>(values, 0)?.ip)))
}

fn masked(values: &[Value]) -> CelAnswer {
    Ok(opaque(own::<Cidr>(values, 0)?.masked()))
}

fn prefix_length(values: &[Value]) -> CelAnswer {
    Ok(integer(usize::from(own::<Cidr>(values, 0)?.bits)))
}

fn shown(values: &[Value]) -> CelAnswer {
    if let Ok(ip) = own::<IpValue>(values, 0) {
        return Ok(string(ip.0.to_string()));
    }
    let Cidr { ip, bits } = own::<Cidr>(values, 0)?;
    Ok(string(format!("{ip}/{bits}")))
}
