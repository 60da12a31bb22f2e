//! `get` and `list`.

use std::sync::Arc;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use mayfly_store::{Entry, Key, ListError, ListOptions, Revision};
use serde::{Deserialize, Serialize};

use super::{key, load, parse_revision};
use crate::{
    registry::Kind,
    render::ListMeta,
    request::{Query, check_list_options},
    selection::Selection,
    server::ServerState,
    status::ApiError,
};

/// Entries that a selector is applied to at once.
const PAGE_ENTRIES: usize = 500;

/// The position at which a list continues. Opaque to clients; the form is upstream's.
#[derive(Debug, Serialize, Deserialize)]
struct Token {
    v: String,
    /// The revision of the first page; [`LATEST`] for a list that continues with the current state.
    rv: i64,
    /// The last key seen: `namespace/name`.
    start: String,
}

const TOKEN_VERSION: &str = "meta.k8s.io/v1";
/// The revision in the token of a list whose first page's revision has expired (upstream's value).
const LATEST: i64 = -1;

impl Token {
    /// `at`: the revision of the first page; `None`: the current one at the next request.
    fn encode(at: Option<Revision>, after: &Key) -> String {
        let start = format!("{}/{}", after.namespace, after.name);
        let rv = at.map_or(LATEST, |revision| revision.0.cast_signed());
        let token = Self { v: TOKEN_VERSION.into(), rv, start };
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(&token).expect("texts and a number serialise"))
    }

    fn decode(kind: &Kind, text: &str) -> Result<(Option<Revision>, Key), ApiError> {
        let invalid = || ApiError::bad_request("invalid continue token: continue key is not valid");
        let incorrect_start = || {
            ApiError::bad_request(
                "invalid continue token: continue key is not valid: incorrect encoded start resourceVersion (version \
                 meta.k8s.io/v1)",
            )
        };
        let bytes = URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).map_err(|_| invalid())?;
        let token: Self = serde_json::from_slice(&bytes).map_err(|_| invalid())?;
        let (namespace, name) = token.start.split_once('/').ok_or_else(invalid)?;
        if token.v != TOKEN_VERSION {
            return Err(invalid());
        }
        let at = match token.rv {
            LATEST => None,
            rv => Some(Revision(u64::try_from(rv).ok().filter(|rv| *rv > 0).ok_or_else(incorrect_start)?)),
        };
        Ok((at, key(kind, namespace, name)))
    }
}

impl ServerState {
    pub(crate) fn get(
        &self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        query: &Query,
    ) -> Result<Arc<Entry>, ApiError> {
        if let Some(asked) = parse_revision(query.resource_version.as_deref().unwrap_or(""))? {
            self.not_in_the_future(asked)?;
        }
        load(&self.store, kind, &key(kind, namespace, name))
    }

    pub(crate) fn not_in_the_future(&self, asked: Revision) -> Result<(), ApiError> {
        let current = self.store.revision();
        if asked > current { Err(ApiError::future_version(asked.0, current.0)) } else { Ok(()) }
    }

    pub(crate) fn list(
        &self,
        kind: &'static Kind,
        namespace: &str,
        query: &Query,
    ) -> Result<(ListMeta, Vec<Arc<Entry>>), ApiError> {
        check_list_options(query)?;
        let mut selection = Selection::parse(kind, query)?;
        let range = selection.range(kind, namespace);
        let (mut at, mut after) = (self.list_revision(query)?, None);
        if let Some(token) = &query.continue_token {
            let (revision, key) = Token::decode(kind, token)?;
            (at, after) = (revision, Some(key));
        }
        let continued = after.clone();
        let expired = || match &continued {
            Some(after) => ApiError::continue_expired(Token::encode(None, after)),
            None => ApiError::list_expired(),
        };
        if at.is_some_and(|at| at < self.compaction.oldest()) {
            return Err(expired());
        }
        let everything = selection.is_everything();
        let mut found: Vec<Arc<Entry>> = Vec::new();
        loop {
            // Without a selector, one page has exactly the missing entries; with one, several pages may be needed.
            let missing = query.limit.map(|limit| limit - found.len());
            let page = if everything { missing } else { query.limit.map(|_| PAGE_ENTRIES) };
            let options = ListOptions { limit: page, after: after.take(), at };
            let listing = self.store.list(&range, &options).map_err(|error| match error {
                ListError::Expired { .. } => expired(),
                ListError::Future { current } => {
                    ApiError::future_version(at.unwrap_or_default().0, current.0)
                }
            })?;
            at = Some(listing.revision);
            let mut meta = ListMeta { revision: listing.revision, ..ListMeta::default() };
            let total = listing.entries.len();
            for (index, entry) in listing.entries.into_iter().enumerate() {
                if everything || selection.matches(&entry) {
                    found.push(entry);
                }
                let full = query.limit.is_some_and(|limit| found.len() >= limit);
                let rest = listing.remaining + (total - index - 1);
                if full && rest > 0 {
                    let last = &found[found.len() - 1].key;
                    meta.continue_token = Some(Token::encode(Some(listing.revision), last));
                    meta.remaining = everything.then_some(rest);
                    return Ok((meta, found));
                }
            }
            match listing.next {
                Some(next) => after = Some(next),
                None => return Ok((meta, found)),
            }
        }
    }

    /// The requested revision of a list; `None` for the current one.
    fn list_revision(&self, query: &Query) -> Result<Option<Revision>, ApiError> {
        let asked = parse_revision(query.resource_version.as_deref().unwrap_or(""))?;
        let rule = query.resource_version_match.as_deref();
        if query.continue_token.is_some() && (rule.is_some() || asked.is_some()) {
            let message = "resourceVersion and resourceVersionMatch are forbidden when continue is provided";
            return Err(ApiError::bad_request(message));
        }
        // Upstream's legacy meaning of a limit with a version is its exact form.
        let is_exact = rule == Some("Exact") || (rule.is_none() && query.limit.is_some());
        if let Some(asked) = asked {
            self.not_in_the_future(asked).map_err(|error| match is_exact {
                // Upstream's storage answers an exact list, and its error has no reason.
                true => ApiError::without_reason("etcdserver: mvcc: required revision is a future revision"),
                false => error,
            })?;
        }
        Ok(asked.filter(|_| is_exact))
    }
}
