//! A catalog for tests of workflows: it ends with the process.

use std::collections::BTreeMap;

use super::{CatalogError, CatalogStore};
use crate::catalog::record::{CatalogChange, Record};

/// The records in memory.
#[derive(Debug, Default)]
pub struct MemoryCatalog(BTreeMap<String, Record>);

impl CatalogStore for MemoryCatalog {
    fn load(&self) -> Result<Vec<Record>, CatalogError> {
        Ok(self.0.values().cloned().collect())
    }

    fn write(&mut self, changes: &[CatalogChange]) -> Result<(), CatalogError> {
        for change in changes {
            match change {
                CatalogChange::Put(record) => drop(self.0.insert(record.arn().to_owned(), record.clone())),
                CatalogChange::Delete(arn) => drop(self.0.remove(arn)),
            }
        }
        Ok(())
    }

    fn in_place(&self) -> Result<(), CatalogError> {
        Ok(())
    }

    fn probe(&mut self) -> Result<(), CatalogError> {
        Ok(())
    }
}
