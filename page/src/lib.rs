//! The shared memory page on which an agent publishes orders to the trainers of its node.
//!
//! One file per job, mapped by one writer and any number of readers. A seqlock over atomic words: the writer
//! never waits, a reader that meets a publication under way tries again a bounded number of times and
//! otherwise keeps the value it has. "Has anything changed" is one atomic load ([`PageReader::counter`]).
//!
//! The file has a fixed size and is never shortened: a reader's mapping stays backed (no SIGBUS). A writer
//! that starts again takes the file over in place, its counter goes on growing, and readers need not reopen.
//! Only when the layout differs is the file replaced; the old one is then marked retired, which readers see.
//! Put pages on a tmpfs: a page is worth nothing after a reboot and should cause no writes to a disk.

mod layout;
mod map;
mod reader;
mod writer;

pub use layout::CAPACITY;
pub use reader::{OpenError, PageReader, READ_TRIES, ReadError};
pub use writer::{CreateError, PageWriter, PublishError};
