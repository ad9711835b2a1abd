-- The worker's database, version 6: how far the log's beginning was cut off. Nothing but people ever asked the log by
-- its resource, and an index of it cost every record a page.

create table log_floor (id text primary key, body text not null) without rowid;
drop index log_resource;
