//! A thread of its own that ends when its handle is dropped.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

/// The handle's side: wakes the thread, and ends it when dropped.
pub(super) struct Owner {
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's side.
pub(super) struct Bell(pub(super) UnixStream);

impl Bell {
    /// Clears pending wake-ups; false when the handle is gone.
    pub(super) fn clear(&mut self) -> bool {
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
