//! A thread of its own that ends when its handle is dropped.

use super::fd::{Interest, wait};
use crate::Nanos;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

/// The handle's side: wakes the thread, and ends it when dropped.
pub(super) struct Owner {
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's side.
pub(super) struct Bell(UnixStream);

impl Bell {
    /// Waits until one of these is ready, the handle rings or `until` has come; returns which of these are ready. `None`
    /// when the thread is to end: the handle is gone, or the system refuses to wait.
    pub(super) fn wait(&mut self, name: &str, interests: &[Interest<'_>], until: Nanos) -> Option<Vec<bool>> {
        let bell = Interest { fd: self.0.as_fd(), write: false };
        match wait(&[interests, &[bell][..]].concat(), until) {
            Ok(mut ready) => (ready.pop() != Some(true) || self.clear()).then_some(ready),
            Err(error) => {
                tracing::error!(%error, "{name} cannot wait for its socket");
                None
            }
        }
    }

    /// Clears pending wake-ups; false when the handle is gone.
    fn clear(&mut self) -> bool {
        let mut sink = [0; 64];
        loop {
            match self.0.read(&mut sink) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

impl Owner {
    /// Starts a named thread.
    pub(super) fn spawn(name: &str, body: impl FnOnce(Bell) + Send + 'static) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(Bell(theirs)))?;
        Ok(Self { wake: Some(ours), thread: Some(thread) })
    }

    /// Makes the thread look at what has changed. A full pipe means that it is about to look anyway.
    pub(super) fn ring(&self) {
        if let Some(mut wake) = self.wake.as_ref() {
            let _ = wake.write(&[1]);
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}
