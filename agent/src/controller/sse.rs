//! Server-sent events, as far as orders need them: pure.

/// Longest event, in bytes: the orders of a node with every limit used are about 1 MiB.
pub(crate) const MAX_EVENT: usize = 4 * 1024 * 1024;

/// An event's name and data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) data: String,
}

/// An event longer than [`MAX_EVENT`], or bytes that are not UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("read the stream of orders: {0}")]
pub(crate) struct BadStream(&'static str);

/// Puts events together from chunks that are cut anywhere.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    line: Vec<u8>,
    after_cr: bool,
    name: String,
    data: String,
    has_data: bool,
}

impl Parser {
    /// Takes the next bytes and returns the events they complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Event>, BadStream> {
        let mut events = Vec::new();
        for &byte in bytes {
            let second_of_crlf = std::mem::replace(&mut self.after_cr, byte == b'\r') && byte == b'\n';
            match byte {
                b'\n' if second_of_crlf => {}
                b'\n' | b'\r' => events.extend(self.end_of_line()?),
                _ if self.line.len() >= MAX_EVENT => return Err(BadStream("a line is too long")),
                _ => self.line.push(byte),
            }
        }
        Ok(events)
    }

    fn end_of_line(&mut self) -> Result<Option<Event>, BadStream> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let event = Event { name: std::mem::take(&mut self.name), data: std::mem::take(&mut self.data) };
            return Ok(std::mem::take(&mut self.has_data).then_some(event));
        }
        let line = String::from_utf8(line).map_err(|_| BadStream("it is not UTF-8"))?;
        // A line that begins with a colon is a comment, here a ping.
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.name = value.to_owned(),
            "data" => {
                if self.data.len() + value.len() > MAX_EVENT {
                    return Err(BadStream("an event is too long"));
                }
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            _ => {}
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn event(name: &str, data: &str) -> Event {
        Event { name: name.into(), data: data.into() }
    }

    const TEXT: &str = ": ping\n\nevent: orders\ndata: {\"a\":\ndata:  1}\n\n:x\r\nid: 7\r\ndata: b\r\n\r\nevent: lost\n\ndata: c\r\rdata: cut";

    proptest! {
        #[test]
        fn cuts_do_not_matter(cuts in prop::collection::vec(0usize..TEXT.len(), 0..10)) {
            let mut cuts = cuts;
            cuts.extend([0, TEXT.len()]);
            cuts.sort_unstable();
            let mut parser = Parser::default();
            let mut events = Vec::new();
            for pair in cuts.windows(2) {
                events.extend(parser.feed(&TEXT.as_bytes()[pair[0]..pair[1]]).unwrap());
            }
            let expected = vec![event("orders", "{\"a\":\n 1}"), event("", "b"), event("", "c")];
            prop_assert_eq!(events, expected);
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..500)) {
            let _ = Parser::default().feed(&bytes);
        }
    }

    #[test]
    fn endless_events_are_refused() {
        let mut parser = Parser::default();
        assert!(parser.feed(&vec![b'x'; MAX_EVENT + 1]).is_err());
        let mut parser = Parser::default();
        let line = [b"data: ".to_vec(), vec![b'x'; MAX_EVENT / 2], b"\n".to_vec()].concat();
        assert!((0..3).any(|_| parser.feed(&line).is_err()));
    }
}
