//! Views: read-only kinds whose objects are kept outside of the store.
//!
//! The owner of the objects implements [`KindView`] and is attached with [`crate::ApiServer::attach_view`]. This
//! module implements selectors, pages, tables and watches; the revisions in `resourceVersion` are the view's own and
//! independent of the store's.

use std::{collections::HashMap, sync::Arc};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use futures::{StreamExt as _, future::BoxFuture, stream::BoxStream};
use mayfly_api::Digest;
use mayfly_store::{Entry, EventKind, Revision, WriteEvent};
use parking_lot::RwLock;
use serde_json::Value;

use crate::{
    negotiate::Representation,
    object::Object,
    registry::Kind,
    render::{ListMeta, ObjectView},
    request::Query,
    selection::Selection,
    server::ServerState,
    status::ApiError,
    verbs::{self, Beginning, Start, WatchEnded, WatchSource},
};

/// The number of objects requested from a view at a time.
const PAGE: usize = 500;

/// The objects of one kind that another component stores. Objects are complete: apiVersion, kind, metadata with name,
/// namespace, uid and a decimal resourceVersion.
pub trait KindView: Send + Sync {
    /// Reads one object.
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<Value>, ViewError>>;

    /// Reads a page, in an order of the view's own.
    fn list(&self, query: ViewQuery) -> BoxFuture<'_, Result<ViewPage, ViewError>>;

    /// Streams the changes after a revision; `whole` as in [`ViewQuery`]. A stream that ends with an error has fallen
    /// behind.
    ///
    /// # Errors
    /// [`ViewError::Expired`] if the changes after the revision are no longer available; list again.
    fn watch(
        &self,
        after: u64,
        whole: bool,
    ) -> Result<BoxStream<'static, Result<ViewEvent, ViewError>>, ViewError>;

    /// The user of this artifact, as the end of a sentence; `None` if the artifact is not used and can be removed.
    fn user_of<'a>(&'a self, _artifact: &'a Digest) -> BoxFuture<'a, Result<Option<String>, ViewError>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// The message for a client that tries to change an object: the reason, and the alternative.
    fn read_only(&self, name: &str) -> String;
}

/// A query for [`KindView::list`].
#[derive(Clone, Debug, Default)]
pub struct ViewQuery {
    /// Empty: all.
    pub namespace: String,
    /// Fields that must have a value (`status.phase`). A view may leave out objects that do not match, but need not.
    pub fields: Vec<(String, String)>,
    /// The maximum number of objects.
    pub limit: usize,
    /// [`ViewPage::next`] of the page before.
    pub after: Option<String>,
    /// Whether large parts of an object are needed; false for a table.
    pub whole: bool,
}

/// A page of objects.
#[derive(Clone, Debug, Default)]
pub struct ViewPage {
    /// The objects of the page.
    pub items: Vec<Value>,
    /// The token of the next page.
    pub next: Option<String>,
    /// The revision from which a watch misses no change after this page.
    pub revision: u64,
}

/// A change, as watches report it.
#[derive(Clone, Debug)]
pub struct ViewEvent {
    /// The change.
    pub change: ViewChange,
    /// The revision after it.
    pub revision: u64,
    /// The object after the change.
    pub object: Value,
}

/// A change of an object.
#[derive(Clone, Debug)]
pub enum ViewChange {
    /// The object was created.
    Created,
    /// The object was modified.
    Modified { previous: Value },
}

/// An error of a view.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ViewError {
    /// The revision is too old: list again.
    #[error("too old")]
    Expired,
    /// The continue token was not issued by this view.
    #[error("continue key is not valid")]
    Continue,
    /// The view failed; the reason is for the operator.
    #[error("{0}")]
    Failed(String),
}

impl From<ViewError> for ApiError {
    fn from(error: ViewError) -> Self {
        match error {
            ViewError::Expired => Self::expired(0, 0),
            ViewError::Continue => Self::bad_request("continue key is not valid"),
            ViewError::Failed(why) => Self::internal(why),
        }
    }
}

/// The views that are attached, by resource.
#[derive(Default)]
pub(crate) struct Views(RwLock<HashMap<&'static str, Arc<dyn KindView>>>);

impl Views {
    /// The user of this artifact in any view.
    pub(crate) async fn user_of(&self, artifact: &Digest) -> Result<Option<String>, ViewError> {
        let views: Vec<_> = self.0.read().values().cloned().collect();
        for view in views {
            if let Some(user) = view.user_of(artifact).await? {
                return Ok(Some(user));
            }
        }
        Ok(None)
    }

    pub(crate) fn attach(&self, resource: &'static str, view: Arc<dyn KindView>) {
        self.0.write().insert(resource, view);
    }

    fn of(&self, kind: &Kind) -> Result<Arc<dyn KindView>, ApiError> {
        let resource = kind.resource();
        self.0.read().get(resource.as_str()).cloned().ok_or_else(|| {
            ApiError::unavailable(format!("{resource} cannot be read yet: the server is starting"))
        })
    }
}

/// An object in the form of an entry of the store.
fn entry(kind: &Kind, object: Value) -> Result<Entry, ApiError> {
    let Value::Object(map) = object else {
        return Err(ApiError::internal("a view returned a value that is not an object"));
    };
    let object = Object(map);
    let revision = object.resource_version().parse().map(Revision).unwrap_or_default();
    let key = verbs::key(kind, object.meta_str("namespace"), object.name());
    Ok(Entry { key, value: object.encode(), created: revision, modified: revision })
}

impl ServerState {
    pub(crate) fn read_only(&self, kind: &Kind, name: &str) -> Result<String, ApiError> {
        Ok(self.views.of(kind)?.read_only(name))
    }

    pub(crate) async fn get_view(&self, kind: &Kind, namespace: &str, name: &str) -> Result<Entry, ApiError> {
        let found = self.views.of(kind)?.get(namespace, name).await?;
        entry(kind, found.ok_or_else(|| ApiError::not_found(kind, name))?)
    }

    pub(crate) async fn list_view(
        &self,
        view: ObjectView,
        namespace: &str,
        query: &Query,
    ) -> Result<(ListMeta, Vec<Entry>), ApiError> {
        let kind = view.kind;
        let source = self.views.of(kind)?;
        let selection = Selection::parse(kind, query)?;
        let mut after = match &query.continue_token {
            None => None,
            Some(token) => {
                let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| ViewError::Continue)?;
                Some(String::from_utf8(bytes).map_err(|_| ViewError::Continue)?)
            }
        };
        let (mut found, mut revision) = (Vec::new(), None);
        let mut asked = query.limit.unwrap_or(PAGE).min(PAGE);
        loop {
            let page = source
                .list(ViewQuery {
                    namespace: namespace.to_owned(),
                    fields: selection.equalities(),
                    limit: asked,
                    after: after.clone(),
                    whole: view.representation == Representation::Object,
                })
                .await?;
            let first = *revision.get_or_insert(page.revision);
            let missing = query.limit.map_or(usize::MAX, |limit| limit - found.len());
            let mut selected = Vec::new();
            let mut excess = None;
            for (index, item) in page.items.into_iter().enumerate() {
                let entry = entry(kind, item)?;
                if !selection.matches(&entry) {
                    continue;
                }
                if selected.len() == missing {
                    excess = Some(index);
                    break;
                }
                selected.push(entry);
            }
            if let Some(index) = excess {
                // Request the page again without the surplus, so that its token is that of the last item.
                asked = index;
                continue;
            }
            found.append(&mut selected);
            // If few items are selected, pages of just the missing number would be too many.
            asked = (asked * 2).min(PAGE);
            let mut meta = ListMeta { revision: Revision(first), ..ListMeta::default() };
            match page.next {
                None => return Ok((meta, found)),
                Some(next) if query.limit.is_some_and(|limit| found.len() >= limit) => {
                    meta.continue_token = Some(URL_SAFE_NO_PAD.encode(next));
                    return Ok((meta, found));
                }
                next => after = next,
            }
        }
    }

    pub(crate) async fn watch_view(
        &self,
        namespace: &str,
        query: &Query,
        view: ObjectView,
        start: Start,
    ) -> Result<Beginning, ApiError> {
        let kind = view.kind;
        let (after, initial) = match start {
            Start { initial: true, .. } => {
                let all = Query { limit: None, continue_token: None, ..query.clone() };
                let (meta, entries) = self.list_view(view, namespace, &all).await?;
                (meta.revision, entries.into_iter().map(Arc::new).collect())
            }
            Start { asked: Some(asked), .. } => (asked, Vec::new()),
            // Any page has the current revision.
            Start { asked: None, .. } => {
                let one = Query { limit: Some(1), ..Query::default() };
                (self.list_view(view, namespace, &one).await?.0.revision, Vec::new())
            }
        };
        let whole = view.representation == Representation::Object;
        let events = self.views.of(kind)?.watch(after.0, whole)?;
        let source = ViewEvents { events, kind, namespace: namespace.to_owned(), progress: after };
        Ok(Beginning { initial, after, source: WatchSource::View(source) })
    }
}

/// The changes of a view as events of the store.
pub(crate) struct ViewEvents {
    events: BoxStream<'static, Result<ViewEvent, ViewError>>,
    kind: &'static Kind,
    /// Empty: all.
    namespace: String,
    progress: Revision,
}

impl ViewEvents {
    /// The next event. May be dropped while it waits without losing one.
    pub(crate) async fn next(&mut self) -> Result<Arc<WriteEvent>, WatchEnded> {
        loop {
            let event = self.events.next().await.ok_or(WatchEnded::Closed)?;
            let event = event.map_err(|error| WatchEnded::Failed(error.into()))?;
            self.progress = Revision(event.revision);
            let event = self.as_stored(event).map_err(WatchEnded::Failed)?;
            if self.namespace.is_empty() || *event.entry.key.namespace == *self.namespace {
                return Ok(Arc::new(event));
            }
        }
    }

    /// The revision up to which all events were returned.
    pub(crate) fn progress(&self) -> Revision {
        self.progress
    }

    fn as_stored(&self, event: ViewEvent) -> Result<WriteEvent, ApiError> {
        let entry = |object| entry(self.kind, object).map(Arc::new);
        let (kind, previous) = match event.change {
            ViewChange::Created => (EventKind::Created, None),
            ViewChange::Modified { previous } => (EventKind::Modified, Some(entry(previous)?)),
        };
        Ok(WriteEvent { kind, entry: entry(event.object)?, previous, revision: self.progress })
    }
}
