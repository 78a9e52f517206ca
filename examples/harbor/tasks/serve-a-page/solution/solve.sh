#!/bin/sh
mkdir -p site
echo hello >site/index.html
httpd -p 8080 -h /work/site
