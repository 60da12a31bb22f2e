use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use wasip2::http::types::Method as WasiMethod;

/// An HTTP request method.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Method {
    /// `GET`, the default.
    #[default]
    Get,
    /// `HEAD`.
    Head,
    /// `POST`.
    Post,
    /// `PUT`.
    Put,
    /// `DELETE`.
    Delete,
    /// `CONNECT`.
    Connect,
    /// `OPTIONS`.
    Options,
    /// `TRACE`.
    Trace,
    /// `PATCH`.
    Patch,
    /// Any other method, as sent.
    Other(String),
}

impl Method {
    /// The method's name in a request, such as `GET`.
    pub fn as_str(&self) -> &str {
        match self {
            Method::Get => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Delete => "DELETE",
            Method::Connect => "CONNECT",
            Method::Options => "OPTIONS",
            Method::Trace => "TRACE",
            Method::Patch => "PATCH",
            Method::Other(name) => name,
        }
    }

    pub(crate) fn from_wasi(method: WasiMethod) -> Self {
        match method {
            WasiMethod::Get => Method::Get,
            WasiMethod::Head => Method::Head,
            WasiMethod::Post => Method::Post,
            WasiMethod::Put => Method::Put,
            WasiMethod::Delete => Method::Delete,
            WasiMethod::Connect => Method::Connect,
            WasiMethod::Options => Method::Options,
            WasiMethod::Trace => Method::Trace,
            WasiMethod::Patch => Method::Patch,
            WasiMethod::Other(name) => Method::Other(name),
        }
    }

    pub(crate) fn to_wasi(&self) -> WasiMethod {
        match self {
            Method::Get => WasiMethod::Get,
            Method::Head => WasiMethod::Head,
            Method::Post => WasiMethod::Post,
            Method::Put => WasiMethod::Put,
            Method::Delete => WasiMethod::Delete,
            Method::Connect => WasiMethod::Connect,
            Method::Options => WasiMethod::Options,
            Method::Trace => WasiMethod::Trace,
            Method::Patch => WasiMethod::Patch,
            Method::Other(name) => WasiMethod::Other(name.clone()),
        }
    }
}

impl FromStr for Method {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(match name {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            "PUT" => Method::Put,
            "DELETE" => Method::Delete,
            "CONNECT" => Method::Connect,
            "OPTIONS" => Method::Options,
            "TRACE" => Method::Trace,
            "PATCH" => Method::Patch,
            other => Method::Other(other.to_owned()),
        })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
