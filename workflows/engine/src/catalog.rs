//! The catalog: state machines with their versions and aliases, activities, tags.
//!
//! [`record`] has the stored form, [`configuration`] the parts of it that the API returns as they are, [`plan`] decides
//! (pure functions from the stored state to a change), [`store`] keeps it, in a SQLite file or in memory. [`Catalog`]
//! connects them: a change is on disk before it is visible, and an acknowledged change survives a crash.
//!
//! Not here: executions (the journal has them), messages and shapes of the API.

mod configuration;
mod plan;
mod record;
mod store;

pub use configuration::{
    ConfigurationRejection, EncryptionConfiguration, LogDestination, LogGroup, LogLevel,
    LoggingConfiguration, TracingConfiguration,
};
pub use plan::{
    CatalogRejection, Created, NewActivity, NewAlias, NewMachine, SeenRevision, UpdateAlias, UpdateMachine,
};
pub use record::{
    Activity, Alias, CatalogChange, CatalogState, MachineRecord, MachineRevision, Publication, Record, Route,
    Version,
};
pub use store::{CatalogError, CatalogStore, MemoryCatalog, SqliteCatalog};

use std::path::Path;

use mayfly_workflows_language::arn::ActivityArn;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use tokio::sync::watch;

use crate::engine::Activities;

/// The catalog of one installation. Reads come from memory; a change waits for the disk.
pub struct Catalog {
    book: RwLock<CatalogState>,
    store: Mutex<Box<dyn CatalogStore>>,
    changed: watch::Sender<()>,
    /// The error of the last write; `None` after a write that succeeded.
    trouble: Mutex<Option<String>>,
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").finish_non_exhaustive()
    }
}

/// The catalog cannot be written. Changes are refused until it can; reads are served from memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the catalog of state machines cannot be written and is tried again: {0}")]
pub struct CatalogFault(String);

impl Catalog {
    /// Opens the catalog in `path`, or one that lives in memory only.
    ///
    /// # Errors
    /// Those of [`SqliteCatalog::open`] and [`Catalog::with_store`].
    pub fn open(path: Option<&Path>) -> Result<Catalog, CatalogError> {
        match path {
            Some(path) => Self::with_store(Box::new(SqliteCatalog::open(path)?)),
            None => Self::with_store(Box::<MemoryCatalog>::default()),
        }
    }

    /// The catalog in a store, whose only writer it is.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn with_store(store: Box<dyn CatalogStore>) -> Result<Catalog, CatalogError> {
        let mut book = CatalogState::default();
        for record in store.load()? {
            book.apply(CatalogChange::Put(record));
        }
        Ok(Catalog {
            book: RwLock::new(book),
            store: Mutex::new(store),
            changed: watch::Sender::default(),
            trouble: Mutex::default(),
        })
    }

    /// Whether changes can be written. After a failed write this writes again, so it may wait for the disk: a catalog is
    /// rarely changed, and recovery should not depend on the next change.
    pub fn health(&self) -> Result<(), CatalogFault> {
        let Some(known) = self.trouble.lock().clone() else {
            // A file that was removed is noticed although nothing is written.
            let Some(store) = self.store.try_lock() else { return Ok(()) };
            return self.note(store.in_place()).map_err(|error| CatalogFault(error.to_string()));
        };
        // Another write is in progress: its result is known soon.
        let Some(mut store) = self.store.try_lock() else { return Err(CatalogFault(known)) };
        match self.note(store.probe()) {
            Ok(()) => Ok(()),
            Err(error) => Err(CatalogFault(error.to_string())),
        }
    }

    /// Remembers how a write went.
    fn note(&self, written: Result<(), CatalogError>) -> Result<(), CatalogError> {
        let failure = match &written {
            // A record that cannot be serialised does not mean that the disk failed.
            Ok(()) | Err(CatalogError::Record(_)) => None,
            Err(error) => Some(error.to_string()),
        };
        let mut trouble = self.trouble.lock();
        if let (None, Some(reason)) = (&*trouble, &failure) {
            tracing::error!(
                reason,
                "the catalog of state machines cannot be written; changes of it are refused"
            );
        }
        *trouble = failure;
        written
    }

    /// Wakes the subscribers after a change.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The current content.
    pub fn read(&self) -> RwLockReadGuard<'_, CatalogState> {
        self.book.read()
    }

    /// Plans a change of the current content, makes it durable, then visible. One change at a time; returns the
    /// plan's result once its change is on disk.
    pub fn change<T, E: From<CatalogError>>(
        &self,
        plan: impl FnOnce(&CatalogState) -> Result<(Vec<CatalogChange>, T), E>,
    ) -> Result<T, E> {
        let mut store = self.store.lock();
        let (changes, answer) = plan(&self.book.read())?;
        if !changes.is_empty() {
            self.note(store.write(&changes))?;
            let mut book = self.book.write();
            changes.into_iter().for_each(|change| book.apply(change));
            drop(book);
            self.changed.send_replace(());
        }
        Ok(answer)
    }
}

impl Activities for Catalog {
    fn exists(&self, arn: &ActivityArn) -> bool {
        self.read().activity(arn).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;

    fn create(catalog: &Catalog, name: &str) -> Result<(), String> {
        let new = NewActivity {
            arn: ActivityArn::from_trusted(format!("arn:aws:states:us-east-1:000000000000:activity:{name}")),
            name: name.to_owned(),
            encryption: EncryptionConfiguration::default(),
            tags: Default::default(),
            now: 1,
        };
        let created =
            catalog.change(|book| book.plan_create_activity(new).map_err(|_| CatalogError::Interrupted));
        created.map(drop).map_err(|error| error.to_string())
    }

    /// A store that can be made to refuse writes.
    #[derive(Default)]
    struct FaultyStore {
        records: MemoryCatalog,
        is_read_only: Arc<AtomicBool>,
    }

    impl FaultyStore {
        fn accepts(&self) -> Result<(), CatalogError> {
            match self.is_read_only.load(Ordering::Relaxed) {
                true => Err(CatalogError::Database(rusqlite::Error::InvalidQuery)),
                false => Ok(()),
            }
        }
    }

    impl CatalogStore for FaultyStore {
        fn load(&self) -> Result<Vec<Record>, CatalogError> {
            self.records.load()
        }
        fn write(&mut self, changes: &[CatalogChange]) -> Result<(), CatalogError> {
            self.accepts()?;
            self.records.write(changes)
        }
        fn in_place(&self) -> Result<(), CatalogError> {
            Ok(())
        }
        fn probe(&mut self) -> Result<(), CatalogError> {
            self.accepts()
        }
    }

    #[test]
    fn a_store_that_cannot_be_written_is_reported_until_it_can() {
        let store = FaultyStore::default();
        let is_read_only = store.is_read_only.clone();
        let catalog = Catalog::with_store(Box::new(store)).expect("opens");
        create(&catalog, "one").expect("written");
        assert_eq!(catalog.health(), Ok(()));
        is_read_only.store(true, Ordering::Relaxed);
        assert_eq!(catalog.health(), Ok(()), "no write has failed yet");
        let refused = create(&catalog, "two").expect_err("nothing can be written");
        let fault = catalog.health().expect_err("a write failed").to_string();
        assert!(fault.ends_with(&refused), "{refused}, {fault}");
        assert_eq!(catalog.health().expect_err("still so").to_string(), fault);
        assert_eq!(catalog.read().activities("").count(), 1, "a refused change is not visible");
        // Recovery does not depend on the next change.
        is_read_only.store(false, Ordering::Relaxed);
        assert_eq!(catalog.health(), Ok(()));
        create(&catalog, "two").expect("written");
        assert_eq!(catalog.read().activities("").count(), 2);
    }

    #[test]
    fn what_must_not_be_opened_is_left_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("catalog.db");
        let refused = || Catalog::open(Some(&path)).map(drop).expect_err("opened").to_string();
        let catalog = Catalog::open(Some(&path)).expect("opens");
        create(&catalog, "one").expect("written");
        let version = |found: i64| {
            let connection = rusqlite::Connection::open(&path).expect("opens");
            connection.pragma_update(None, "user_version", found).expect("set");
        };
        drop(catalog);
        version(2);
        assert!(
            refused().contains("was written in format 2, and this Mayfly knows format 1"),
            "{}",
            refused()
        );
        version(1);
        assert_eq!(Catalog::open(Some(&path)).expect("opens").read().activities("").count(), 1);
        let mark = folder.path().join("catalog.db-mark");
        let _ = std::fs::remove_file(&mark);
        std::fs::create_dir(&mark).expect("made");
        let unreadable = refused();
        assert!(
            unreadable.contains("catalog.db-mark cannot be opened") && !unreadable.contains("damaged"),
            "{unreadable}"
        );
    }
}
