//! One function's route: the choice of the revision for a request.

use std::sync::{Arc, atomic::Ordering};

use http::{HeaderMap, HeaderName, HeaderValue};
use mayfly_api::{Function, ObjectKey, function::Sticky, wellknown::FUNCTION_PATH_PREFIX};

use super::{
    plan::LATEST,
    sticky::{ByCookie, SetCookie, Visitor},
};
use crate::{refusal::Refusal, target::RevisionTarget};

/// Selects one traffic target, independent of the traffic split.
pub const HEADER_TAG: HeaderName = HeaderName::from_static("mayfly-tag");

/// The minimum number of digits at the end of a revision's name.
const REVISION_DIGITS_MIN: usize = 5;

/// A function's route, with everything precomputed that does not depend on a request.
pub(crate) struct FunctionRoute {
    pub(crate) key: ObjectKey,
    /// The version of the function that it was made from.
    function: Option<Arc<Function>>,
    /// `/fn/<namespace>/<name>`
    pub(crate) prefix: HeaderValue,
    ends: Vec<RouteTarget>,
    split: Split,
    sticky: Option<StickyBy>,
}

/// One traffic target.
#[derive(Clone)]
pub(crate) struct RouteTarget {
    pub(crate) to: Result<Arc<RevisionTarget>, Refusal>,
    pub(crate) identity: String,
    pub(crate) percent: u32,
    pub(crate) tag: Option<String>,
}

/// The distribution of untagged requests.
enum Split {
    /// No target has a share.
    None,
    All(usize),
    /// Each target gets its share of all requests, at random: any fixed order resonates with clients that repeat their
    /// requests in a fixed order.
    Shares(Box<[(usize, u32)]>),
}

enum StickyBy {
    Header(HeaderName),
    Cookie(ByCookie),
}

/// The chosen target of a request.
pub(crate) struct RouteChoice<'a> {
    pub(crate) target: &'a Arc<RevisionTarget>,
    pub(crate) set_cookie: Option<SetCookie>,
}

impl FunctionRoute {
    pub(crate) fn new(key: ObjectKey, ends: Vec<RouteTarget>, sticky: Option<&Sticky>) -> Self {
        let prefix = format!("{FUNCTION_PATH_PREFIX}{}/{}", key.namespace, key.name);
        let split = Split::of(&ends);
        let sticky = match &split {
            Split::Shares(_) => sticky.and_then(|sticky| StickyBy::of(sticky, &ends, &prefix)),
            Split::None | Split::All(_) => None,
        };
        let prefix = HeaderValue::try_from(prefix).unwrap_or(HeaderValue::from_static("/"));
        Self { key, function: None, prefix, ends, split, sticky }
    }

    pub(crate) fn made_from(self, function: Arc<Function>) -> Self {
        Self { function: Some(function), ..self }
    }

    /// Whether the function has no public address.
    pub(crate) fn is_private(&self) -> bool {
        self.function.as_ref().is_some_and(|function| !function.spec.visibility.is_public())
    }

    /// Whether requests are routed by this version of the function, or a later one; `latest`: the revision that its
    /// target `latest: true` resolves to.
    pub(crate) fn follows(&self, function: &Function, latest: Option<&str>) -> bool {
        let own = self.function.as_ref().map(|own| &own.metadata);
        let is_it = own.is_some_and(|own| {
            own.uid == function.metadata.uid && own.generation >= function.metadata.generation
        });
        is_it
            && self.ends.iter().all(|end| match &end.to {
                Ok(to) => end.identity != LATEST || Some(to.key.name.as_str()) == latest,
                Err(_) => false,
            })
    }

    /// The targets, if each of them has a revision that still exists.
    pub(crate) fn working_ends(&self) -> Option<Vec<RouteTarget>> {
        let works = |end: &RouteTarget| end.to.as_ref().is_ok_and(|to| !to.deleted.load(Ordering::Acquire));
        self.ends.iter().all(works).then(|| self.ends.clone())
    }

    pub(crate) fn tags(&self) -> impl Iterator<Item = &str> {
        self.ends.iter().filter_map(|end| end.tag.as_deref())
    }

    /// `tag` comes from the host; a header has the same meaning. `by_host`: cookies apply to all paths.
    pub(crate) fn choose(
        &self,
        headers: &HeaderMap,
        tag: Option<&str>,
        by_host: bool,
    ) -> Result<RouteChoice<'_>, Refusal> {
        let tag = match (tag, headers.get(HEADER_TAG)) {
            (Some(tag), _) => Some(tag),
            (None, Some(tag)) => Some(tag.to_str().unwrap_or("?")),
            (None, None) => None,
        };
        let (end, set_cookie) = match tag {
            Some(tag) => (self.tagged(tag)?, None),
            None => self.untagged(headers, by_host)?,
        };
        match &self.ends[end].to {
            Ok(target) => Ok(RouteChoice { target, set_cookie }),
            Err(refusal) => Err(refusal.clone()),
        }
    }

    fn tagged(&self, tag: &str) -> Result<usize, Refusal> {
        let found = self.ends.iter().position(|end| end.tag.as_deref() == Some(tag));
        found.ok_or_else(|| {
            let tags: Vec<_> = self.tags().collect();
            Refusal::no_tag(&self.key.to_string(), tag, &tags)
        })
    }

    fn untagged(&self, headers: &HeaderMap, by_host: bool) -> Result<(usize, Option<SetCookie>), Refusal> {
        let shares = match &self.split {
            Split::All(end) => return Ok((*end, None)),
            Split::None => return Err(Refusal::no_revision(&self.key.to_string())),
            Split::Shares(shares) => shares,
        };
        let at_random = || by_number(shares, rand::random());
        Ok(match &self.sticky {
            None => (at_random(), None),
            Some(StickyBy::Header(name)) => match headers.get(name) {
                Some(value) => (self.by_hash(value.as_bytes()), None),
                None => (at_random(), None),
            },
            Some(StickyBy::Cookie(cookie)) => {
                let (end, has_chosen) = match cookie.visitor(headers, |end| self.ends[end].percent > 0) {
                    Visitor::Of(end) => (end, true),
                    // The application's own cookie: its value identifies the visitor, and selects the revision by its
                    // hash.
                    Visitor::With(value) if !self.is_identity(value) => {
                        (self.by_hash(value.as_bytes()), true)
                    }
                    Visitor::With(_) | Visitor::New => (at_random(), false),
                };
                (end, Some(cookie.set(end, by_host, has_chosen)))
            }
        })
    }

    /// Whether a value may be the identity of a target of this function, now or before: many visitors share it, so
    /// hashing it would send them all to one target.
    fn is_identity(&self, value: &str) -> bool {
        let number = value.strip_prefix(self.key.name.as_str()).and_then(|rest| rest.strip_prefix('-'));
        let numbered = number.is_some_and(|number| {
            number.len() >= REVISION_DIGITS_MIN && number.bytes().all(|byte| byte.is_ascii_digit())
        });
        numbered || value == LATEST
    }

    /// Weighted rendezvous hashing: each value has its own order of targets, and a change of shares moves as few values
    /// as possible. Deterministic across processes.
    fn by_hash(&self, value: &[u8]) -> usize {
        let score = |end: &RouteTarget| {
            let hash = mixed(fnv1a(fnv1a(FNV_OFFSET, end.identity.as_bytes()), value));
            // Uniform over (0, 1), then exponential with the share as its rate: the smallest value wins.
            let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            -uniform.ln() / f64::from(end.percent)
        };
        let weighted = self.ends.iter().enumerate().filter(|(_, end)| end.percent > 0);
        let best = weighted.min_by(|(_, a), (_, b)| score(a).total_cmp(&score(b)));
        best.map_or(0, |(at, _)| at)
    }
}

impl Split {
    fn of(ends: &[RouteTarget]) -> Self {
        let shares = ends.iter().map(|end| end.percent).enumerate();
        let weighted: Vec<(usize, u32)> = shares.filter(|(_, percent)| *percent > 0).collect();
        match weighted.as_slice() {
            [] => Self::None,
            [(only, _)] => Self::All(*only),
            _ => Self::Shares(weighted.into()),
        }
    }
}

/// Maps a number to a target, proportionally to the shares. There must be at least one target.
fn by_number(shares: &[(usize, u32)], number: u32) -> usize {
    let total: u64 = shares.iter().map(|(_, percent)| u64::from(*percent)).sum();
    let mut point = (u64::from(number) * total) >> 32;
    for (at, percent) in shares {
        match point.checked_sub(u64::from(*percent)) {
            Some(rest) => point = rest,
            None => return *at,
        }
    }
    shares.last().map_or(0, |(at, _)| *at)
}

impl StickyBy {
    fn of(sticky: &Sticky, ends: &[RouteTarget], prefix: &str) -> Option<Self> {
        if let Some(name) = &sticky.header {
            return HeaderName::try_from(name.as_str()).ok().map(Self::Header);
        }
        let identities = ends.iter().map(|end| end.identity.as_str());
        ByCookie::new(sticky.cookie.as_deref()?, identities, prefix).map(Self::Cookie)
    }
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The finalizer of splitmix64: FNV alone distributes the high bits badly.
fn mixed(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
