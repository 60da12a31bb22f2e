//! What callers have created: state machines with their versions and aliases, activities, tags.
//!
//! [`record`] says what is kept, [`plan`] decides (plain functions from what there is to what changes),
//! [`store`] keeps it in a SQLite file. [`Catalog`] puts them together: a change is on disk before anyone
//! can see it, and whatever was acknowledged is there again after a crash.
//!
//! Not here: executions (the journal has them), wording and shapes of the API.

mod plan;
mod record;
mod store;

pub use plan::{Created, NewActivity, NewAlias, NewMachine, Refusal, UpdateAlias, UpdateMachine};
pub use record::{Activity, Alias, Book, Change, Kind, Machine, Record, Revision, Route, Version};
pub use store::CatalogError;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::path::Path;
use store::Store;
use tokio::sync::watch;

/// The catalog of one installation. Reads come from memory; a change waits for the disk.
pub struct Catalog {
    book: RwLock<Book>,
    store: Mutex<Store>,
    changed: watch::Sender<()>,
}

impl Catalog {
    /// Opens the catalog in `path`, or one that lives in memory only.
    pub fn open(path: Option<&Path>) -> Result<Catalog, CatalogError> {
        let store = Store::open(path)?;
        let mut book = Book::default();
        for record in store.load()? {
            book.apply(Change::Put(record));
        }
        Ok(Catalog { book: RwLock::new(book), store: Mutex::new(store), changed: watch::Sender::default() })
    }

    /// Wakes whoever wants to look again after a change.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// What there is now.
    pub fn read(&self) -> RwLockReadGuard<'_, Book> {
        self.book.read()
    }

    /// Plans a change against what there is, makes it durable, then visible. One change at a time; the
    /// plan's answer comes back once its change is on disk.
    pub fn change<T, E: From<CatalogError>>(
        &self,
        plan: impl FnOnce(&Book) -> Result<(Vec<Change>, T), E>,
    ) -> Result<T, E> {
        let mut store = self.store.lock();
        let (changes, answer) = plan(&self.book.read())?;
        if !changes.is_empty() {
            store.write(&changes)?;
            let mut book = self.book.write();
            changes.into_iter().for_each(|change| book.apply(change));
            drop(book);
            self.changed.send_replace(());
        }
        Ok(answer)
    }
}
