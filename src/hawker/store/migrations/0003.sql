-- The worker's database, version 3: the sketch of its images, so that the catalog keeps it while the worker starts.

create table sketch (id text primary key, body text not null) without rowid;
